"""Where the CUDA C++ headers lie that operators share (blocks/cuda)."""

from pathlib import Path

CUDA_HEADERS = (Path(__file__).with_name("cuda"),)  # the `include` of a `core.cuda.Module`
