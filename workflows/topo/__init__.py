"""`phasewise topo`: the machine, its trees, its plans and its probe as JSON values and pictures."""
