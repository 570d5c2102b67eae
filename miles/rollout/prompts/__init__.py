"""Prompts: their files, how a row becomes a sample, and their order in a run."""
