"""Ready-made filters, by dotted path."""
