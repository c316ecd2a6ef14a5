"""Metrics of images as pure functions, judge networks, and measurements of whole sets with intervals."""
