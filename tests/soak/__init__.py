"""Trials of a server for minutes or hours, and of its parsers: `make test-soak` runs them all."""
