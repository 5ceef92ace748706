"""Readers of model files: GGUF, safetensors, config.json, and the directory they lie in."""
