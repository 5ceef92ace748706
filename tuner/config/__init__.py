"""Service configurations: the times of their steps, the cost of a trace, and the search for the best."""
