"""The Triton kernels of a mixture of experts, around the grouped products and for few tokens."""
