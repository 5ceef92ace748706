"""`phasewise prune`: a model with a share of its weights set to zero, as a Hugging Face directory."""
