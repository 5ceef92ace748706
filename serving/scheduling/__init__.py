"""Continuous batching: admission, prefill chunks, turns of clients, prefix reuse, pacing."""
