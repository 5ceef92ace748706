"""What `phasewise quantise` does: a model's weights in fewer bits, as a GGUF file."""
