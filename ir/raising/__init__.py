"""Raising of a C file to the high level: preprocessed, parsed, raised."""
