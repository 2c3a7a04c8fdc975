"""Kernels, one folder an operation; they import nothing of composer."""
