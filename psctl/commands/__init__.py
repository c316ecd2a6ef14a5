"""One module per command; each parses, calls and prints."""
