"""The work of each command, callable from Python: open a model, tune, verify, compare.

Nothing here prints. A function that has something to tell while it works takes `report`, a callback that is
given one line of text at a time.
"""
