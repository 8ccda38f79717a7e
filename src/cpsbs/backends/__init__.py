"""Where the arithmetic of a search runs."""
