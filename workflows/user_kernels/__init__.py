"""The work of `phasewise kernels` and `tune-kernels --kernel`."""
