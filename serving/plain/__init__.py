"""Plain diffusers: the baseline that denoises batches of one resolution, and its memory formats."""
