"""C kernels, compiled once per instruction set, and thin doors to them. Imports nothing else of ours."""
