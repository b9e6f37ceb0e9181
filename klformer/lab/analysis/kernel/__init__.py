"""Learned kernels, looked at."""
