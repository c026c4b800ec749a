"""Speech out of a model, and what judges it."""
