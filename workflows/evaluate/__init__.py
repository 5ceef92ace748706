"""Judge a model as it runs: `phasewise eval`."""
