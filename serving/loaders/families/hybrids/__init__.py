"""Families whose layers keep a state in forms that no other family has."""
