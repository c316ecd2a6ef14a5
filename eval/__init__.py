"""Quality metrics, paired comparisons and quality gates on images that the engine made.

`psnr` and `clip` are plain functions on arrays and embeddings, `fid` and `inception` the Frechet distance with the
weights that everybody's figures use, `bundled` the figures of the bundled models' cards.
"""
