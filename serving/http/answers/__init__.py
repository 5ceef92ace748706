"""Outgoing answers: pieces that the engine delivers, OpenAI's objects, server-sent events."""
