"""Predict how long answers will be: read prompts and logs, collect answers, compare methods."""
