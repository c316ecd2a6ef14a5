"""What the patch cache costs in quality and gains in time (`psctl bench cache`)."""
