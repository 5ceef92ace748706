"""`phasewise serve`: from settings to a running server, alone or with pools."""
