"""`phasewise topo`."""


def topo() -> None:
    """Being built."""
