"""Find the cores and ranks of each phase: the subject, the search, the last run and its verdict."""
