"""Structured output: grammars, their limits, and the guides that hold answers to them."""
