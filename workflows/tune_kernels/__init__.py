"""Tuning of kernels: which products are tuned on which cores, and one tuning run over them."""
