"""Where every patch of a batch of mixed resolutions lies (PatchedServe section 4.1), at each level of a model."""
