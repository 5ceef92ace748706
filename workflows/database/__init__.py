"""`phasewise db`: rows as JSON values, and sharing them."""
