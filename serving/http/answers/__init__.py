"""Answers on their way out: pieces of the engine, OpenAI's objects, server-sent events."""
