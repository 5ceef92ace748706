"""What `phasewise kernels` and `tune-kernels --kernel` do."""
