"""The SGLang server as Miles uses it: its arguments, its process and the Ray actor that holds it."""
