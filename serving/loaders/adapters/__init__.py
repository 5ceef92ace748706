"""Adapters of a model (LoRA), from PEFT's directories and from GGUF files."""
