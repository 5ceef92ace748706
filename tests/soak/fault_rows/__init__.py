"""Faults done to a running server, a function for each; tests/soak/faults.py runs them."""
