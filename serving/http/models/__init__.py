"""The models that requests may name: those kept from start to end, and those loaded on demand."""
