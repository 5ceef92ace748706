"""The ops of parts of a layer that not every model has."""
