"""Google's Gemma models, which share norms, activations and the scale of embeddings."""
