"""The engine's stages on a virtual clock, on any number of GPUs, driven by the same policies. No torch."""
