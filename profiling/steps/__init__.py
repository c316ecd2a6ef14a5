"""Benchmarks of single denoising steps: the patch engine against plain diffusers, and where the time goes."""
