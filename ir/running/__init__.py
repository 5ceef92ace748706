"""Kernels in processes with limits: drawn arguments, comparison with the original, timing."""
