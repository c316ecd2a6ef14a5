"""Plain diffusers: the baseline that denoises batches of one resolution, and the memory formats that it may run in."""
