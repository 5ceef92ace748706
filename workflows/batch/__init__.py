"""Offline batches: requests from a file, answers to a file."""
