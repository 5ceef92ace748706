"""Sampling: from logits to tokens, and what holds where a request does not say."""
