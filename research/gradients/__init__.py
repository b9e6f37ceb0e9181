"""Gradients at the classifier on the way to the solution."""
