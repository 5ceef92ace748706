"""Prompts, logs of answers, and predictors of answers' lengths."""
