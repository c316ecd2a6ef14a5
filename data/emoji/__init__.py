"""The world the bundled models are trained on: Fluent emoji art (MIT) composed on coloured backgrounds, with captions.

`art` rasterises the shipped SVG drawings, `scene` samples and renders compositions, `dataset` numbers them, so that
every picture of every split can be drawn again from (seed, split, resolution, index) alone.
"""
