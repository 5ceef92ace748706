"""Packs of prompts' beginnings, and folders that keep them: `phasewise prefix`."""
