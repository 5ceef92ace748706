"""Merging: a model and an adapter as one model."""
