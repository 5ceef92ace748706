"""Service configurations: how long their steps take, what a trace then costs, and which one is best."""
