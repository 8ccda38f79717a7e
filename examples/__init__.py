"""Examples, each a program of its own; what some of them define can be imported too."""
