"""The patch engine: unmodified diffusers models run on batches of mixed resolutions (PatchedServe section 4).

`packing` says where the patches of every request lie at every level of a model, `leaves` and `attention` hold what
takes the place of the leaf modules that read beyond one patch, `swap` puts them in and takes them out again, `strategy`
measures which way of convolving is faster for a layer, and `stepper` advances all active requests by one step.
"""
