"""Keys and values on their way from the instance that computes a prompt to the one that answers it.

`sender` runs beside the engine that computes, `receiver` beside the one that answers, `frames` is what they
say to each other. Decision 0042.
"""
