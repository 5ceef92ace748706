"""Incoming requests: bodies, schemas, and the `Submit` messages made of them for the engine."""
