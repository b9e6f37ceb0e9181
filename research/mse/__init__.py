"""Theorem 3 by simulation."""
