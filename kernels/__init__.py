"""Tensor functions: for each a torch reference and a Triton kernel of the same name and signature.

The lowest floor: it imports nothing from the other packages, and triton only when a Triton kernel is launched. Every
dispatcher takes `kernels`, one of "auto" (Triton for CUDA tensors, torch for all others), "torch" and "triton"; what
they share is in `launch`.
"""
