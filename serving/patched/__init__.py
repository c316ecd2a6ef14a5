"""The patch engine: unmodified diffusers models run on batches of mixed resolutions (PatchedServe section 4).

`leaves` and `attention` replace the leaf modules that read beyond one patch and share a `context`; `swap` puts them in
and takes them out again. `patched_model` runs the result, `cached_block` puts the cache before its blocks, `tuning`
measures which way of convolving is faster for a layer, and `stepper` advances all active requests by one step.
"""
