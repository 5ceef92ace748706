"""Names of models, fetching them from a hub, and the cache directory."""
