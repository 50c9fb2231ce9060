"""Row classes of the MLP. It has no kernels of its own, and so no launch configs: those of its products are in the
packages of `linear` and `matmul`."""

FEW_ROWS = 64  # up to so many rows the weights' bytes bound the products, and `linear` has kernels for that
