"""Tensor functions, each with a torch reference and a Triton kernel of the same name and signature.

This is the lowest floor: it imports nothing from the other packages, and triton only when a Triton kernel is launched.
Every dispatcher takes `kernels`, one of "auto" (Triton for CUDA tensors, torch for all others), "torch" and "triton".
Shared functions are in `launch`.
"""
