"""Edits of images by mask (InstGenIE): their first latents, the final paste, and the records that they read."""
