"""Edits of images by mask (InstGenIE): how they start and end, and the records of images that they read."""
