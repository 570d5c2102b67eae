"""The Ray actor that owns the engines and turns prompts into training data."""
