"""Functions of the user's own in slots of the kernels' table (contract.h): loaded, checked, installed."""
