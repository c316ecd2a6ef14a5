"""Positions of the patches of a batch of mixed resolutions (PatchedServe section 4.1), at each level of a model."""
