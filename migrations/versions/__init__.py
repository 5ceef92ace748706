"""One file a revision. A revision defines the tables that it touches and imports nothing of phasewise."""
