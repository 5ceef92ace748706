"""A model's weights in fewer bits, as a GGUF file: `phasewise quantise`."""
