"""vLLM's linear layers on its CPU platform, multiplied by our packed weights: a plugin of vLLM's."""
