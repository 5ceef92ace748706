"""`phasewise db`: rows as JSON values, sharing them, verifying imported schedules."""
