__version__ = "0.3.0"

SCHEMA_VERSION = 1
"""The version of the JSON that commands print and keep; a change that breaks readers raises it."""
