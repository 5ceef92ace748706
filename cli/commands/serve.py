"""`phasewise serve`."""


def serve() -> None:
    """Being built."""
