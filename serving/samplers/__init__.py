"""Samplers: diffusers schedulers for one request at a time, and the batched update that equals them."""
