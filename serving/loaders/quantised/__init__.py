"""Readers of quantised safetensors: compressed-tensors, AWQ, GPTQ and FP8. A quantised weight is several
tensors of a file. Each reader gives the same numbers as the package whose format it is, in the smallest
packed form that holds them exactly (decision 0102)."""
