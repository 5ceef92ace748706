"""Kernel searches: pure generators over an evaluator that the caller owns; see `protocol`."""
