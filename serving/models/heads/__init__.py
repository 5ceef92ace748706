"""Heads that draft for a model: their kinds, their ops, and the rows that they read."""
