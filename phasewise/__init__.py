"""Serve LLMs on CPUs with two execution plans, one for prefill and one for decode."""

from phasewise._version import __version__

__all__ = ["__version__"]
