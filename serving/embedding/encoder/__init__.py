"""Models that make vectors of texts, or scores of pairs of texts: one pass over the whole of each input.

`text` turns texts into tokens, `program` a model into ops, `pooling` rows into vectors; `embedder` does it
all."""
