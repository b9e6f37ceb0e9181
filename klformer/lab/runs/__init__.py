"""Experiments: what is run, with which settings, and where the results go."""
