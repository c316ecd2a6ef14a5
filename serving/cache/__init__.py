"""The patch cache (PatchedServe section 5): before each block of the model it is decided patch by patch, or for all of
them as one request by request, whether an earlier step's output still serves, and only the others are computed. `cells`
and `active` say where patches lie, `slots` and `store` keep tensors, `forecast` carries outputs on, `rules` decide, and
`patch_cache` puts it together. It knows nothing of models."""
