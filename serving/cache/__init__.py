"""The patch cache (PatchedServe section 5), independent of any model.

Before each block of the model, the cache decides for each patch whether the output of an earlier step can be reused;
alternatively it decides for each request, once for all blocks. Only the remaining patches are computed. `cells` and
`active` locate patches, `slots` and `store` keep tensors, `forecast` extrapolates outputs, `rules` decide, and
`patch_cache` combines them.
"""
