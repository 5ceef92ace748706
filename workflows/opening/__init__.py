"""Open a model: its name, its weights, its plans, its tuned schedules and its drafts."""
