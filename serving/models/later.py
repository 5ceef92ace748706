"""The mark of config fields that files and fingerprints leave out where a field has its default."""

from __future__ import annotations

LATER = {"later": True}
"""Metadata of a field that was added later: files without it stay valid."""
