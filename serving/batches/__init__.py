"""Batches of requests: their lines, and their files and states in SQLite. No HTTP, no engine."""
