"""C kernels, compiled once per instruction set, and their Python interface.

Imports no other package of ours.
"""
