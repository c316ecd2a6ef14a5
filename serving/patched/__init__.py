"""The patch engine: unmodified diffusers models run on batches of mixed resolutions (PatchedServe section 4).

`leaves` and `attention` replace the leaf modules that read beyond one patch and share a `context`; `swap` inserts and
removes them. `patched_model` runs the result, `cached_block` puts the cache in front of its blocks, `tuning` measures
the faster convolution strategy for each layer, and `stepper` advances all active requests by one step.
"""
