"""Mixers that keep a state of constant size for each sequence in place of keys and values."""
