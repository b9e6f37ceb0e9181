"""Learned kernels beside the same kernels frozen."""
