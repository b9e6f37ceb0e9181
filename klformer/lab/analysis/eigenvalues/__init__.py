"""Eigenvalues of the covariance of the frequencies."""
