"""Requests on their way in: bodies, schemas, and the messages that the engine is sent."""
