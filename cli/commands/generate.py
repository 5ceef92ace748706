"""`phasewise generate`."""


def generate() -> None:
    """Being built."""
