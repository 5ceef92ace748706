"""Loaders of encoders (BERT and its kin), from GGUF files and Hugging Face directories."""
