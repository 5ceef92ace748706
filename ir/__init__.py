"""Hand-written C kernels as text that a person edits: parsed, raised, checked, lowered to other targets."""
