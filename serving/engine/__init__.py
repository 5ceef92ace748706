"""The engine: one turn of its loop, its thread, its messages, and how it is opened."""
