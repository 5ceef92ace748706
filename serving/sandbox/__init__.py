"""Sandboxes for unchecked input: a process with limits of memory and time, a jinja2 environment."""
