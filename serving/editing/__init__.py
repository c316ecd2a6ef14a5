"""Edits of images by mask (InstGenIE): exact so far, as diffusers' inpainting pipelines do them."""
