"""Runs of kernels in limited processes: arguments drawn, results compared with the original, calls timed."""
