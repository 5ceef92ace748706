"""Parts of layers: each says its tensors, its rows in the arena and its operations."""
