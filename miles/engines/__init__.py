"""An inference engine as its users reach it: over HTTP, whoever started it."""
