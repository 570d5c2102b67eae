"""Conversations with tools: the endpoint that agents ask, how messages become tokens, and the calls in an answer."""
