"""Sandboxes for input of strangers: a process with limits of memory and time, a jinja2 environment."""
