"""Residency: where each piece of memory of trainer and engines lives, and how it moves between them."""
