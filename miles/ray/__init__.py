"""Ray actors and their placement."""
