"""Drafts: tokens that an answer may go on with, checked several in one step (Leviathan et al. 2023)."""
