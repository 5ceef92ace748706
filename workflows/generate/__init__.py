"""`phasewise generate`, and the settings of one answer."""
