"""Metrics of images as pure functions, the networks that judge, and measuring whole sets with intervals."""
