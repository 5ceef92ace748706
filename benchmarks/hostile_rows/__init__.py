"""Attacks on a running server, a function for each row; benchmarks/hostile.py runs them."""
