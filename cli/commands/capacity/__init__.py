"""`phasewise simulate` and `phasewise provision`: their options, and their results as text."""
