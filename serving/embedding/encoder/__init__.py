"""Models that make vectors of texts, or scores of pairs of texts: one pass over the whole of each input."""
