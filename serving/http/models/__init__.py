"""The models that requests may name: those that a server keeps, and those that come and go."""
