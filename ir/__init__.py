"""Hand-written C kernels as text that a person edits: parsed, raised, checked and lowered to other
instruction sets."""
