"""Tensor functions: for each a torch reference and a Triton kernel of the same name and signature.

The lowest floor: it imports nothing from the other packages. It holds nothing yet; the patch engine brings the first.
"""
