"""`phasewise simulate` and `phasewise provision`: the load, the simulation, the cheapest cluster."""
