"""`phasewise embed` and `phasewise tune-embed`."""
