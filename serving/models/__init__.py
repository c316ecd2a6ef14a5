"""Models: loading and checking diffusers folders, what a served model consists of, and the families that differ."""
