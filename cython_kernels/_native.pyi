"""The compiled module, for type checkers: its doors are untyped, the Python modules around them are not."""

from typing import Any

def __getattr__(name: str) -> Any: ...
