"""A model in memory, and the program of operations that one forward step of it is."""
