"""Models: loading and checking of diffusers folders, and the parts of a served model."""
