"""Sampling: from logits to tokens, and the defaults for fields that a request leaves out."""
