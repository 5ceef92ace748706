"""What `phasewise eval` does: judge a model as it runs."""
