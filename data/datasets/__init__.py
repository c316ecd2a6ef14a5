"""Sets of images with captions for evaluation, read as they were published.

`registry.open_dataset` opens a data set by its spec, such as "coco:PATH" (`spec.parse_spec`). `sampling.sample_pairs`
draws the same pairs from it on every machine, `loading` passes their images to the metrics, and `folders` pairs two
folders of images.
"""
