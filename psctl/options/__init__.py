"""Options that commands share, in groups."""
