"""Hugging Face checkpoints: what config.json says of a model, how its weights are stored, named and cut."""
