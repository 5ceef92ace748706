"""`phasewise replay` and `doctor --bits`: answers computed again and compared."""
