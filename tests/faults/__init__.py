"""What goes wrong outside the program: nothing is lost, and nothing is silently wrong."""
