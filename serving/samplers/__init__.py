"""Samplers: diffusers schedulers for one request at a time, and an equivalent batched update."""
