"""The patch cache (PatchedServe section 5): before each block of the model it is decided patch by patch whether last
step's output still serves, and only the other patches go through the block. `cells` and `active` say where patches lie,
`slots` and `store` keep tensors, `rules` decide, and `patch_cache` puts it together. It knows nothing of models."""
