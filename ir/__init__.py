"""Hand-written C kernels as text that a person edits: parsed, raised, checked and moved to other instruction
sets.
"""
