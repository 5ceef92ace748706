"""Keys and values on their way from the instance that computes a prompt to the one that answers it.

`sender` runs beside the engine that computes, `receiver` beside the one that answers, `frames` is the form of
their messages. Decision 0042.
"""
