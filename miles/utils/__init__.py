"""What every part of Miles shares: argument parsing and the Sample type."""
