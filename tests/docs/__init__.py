"""The documentation: pages that run, and tables that show the last results."""
