"""Runs of kernels in processes with limits: arguments drawn, results compared with the original, calls timed."""
