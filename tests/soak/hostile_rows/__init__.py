"""Attacks on a running server, a function for each row; tests/soak/hostile.py runs them."""
