"""Tool calls and thoughts in answers, as the model's own template writes them."""
