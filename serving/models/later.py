"""The mark of fields that files and fingerprints of configs do not mention where they have their defaults."""

from __future__ import annotations

LATER = {"later": True}
"""Metadata of a field: files of before it stay as they are."""
