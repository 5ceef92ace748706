"""Folders that keep prompts' beginnings: `phasewise prefix`."""
