"""Models: loading and checking diffusers folders, and what a served model consists of."""
