"""Where samples come from: prompt files, the position in them, and generation."""
