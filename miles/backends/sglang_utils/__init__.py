"""The SGLang server as Miles uses it: its arguments, its process, its HTTP client and the Ray actor that holds it."""
