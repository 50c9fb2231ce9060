"""Implementation names of CUDA C++ kernels that are built for an older architecture than the GPU's own.

"cuda_sm75" is the `cuda` backend compiled to PTX for sm_75, which the driver finishes for the GPU at hand: the
instructions and tiles that a T4 executes, on whichever GPU is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd.grad_mode import set_multithreading_enabled

from flashkernel.core import cuda

CUDA = "cuda"
BUILDS = {"cuda_sm75": 75, "cuda_sm80": 80}  # implementation name -> architecture


def backend_of(implementation: str) -> str:
    """The backend that an implementation runs: "cuda" for a build, else the name itself.

    Example:
        >>> backend_of("cuda_sm75"), backend_of("triton")
        ('cuda', 'triton')
    """
    return CUDA if implementation in BUILDS else implementation


@contextmanager
def build(implementation: str) -> Iterator[None]:
    """Inside, CUDA C++ kernels are built as the implementation's name says; any other name changes nothing.

    Backward passes run in the calling thread inside: the architecture is a context variable, which autograd's own
    threads do not see. Calls are not replayed inside, so the host takes longer for each; the timer queues launches
    behind a sleeping GPU or captures them into a CUDA graph, so measured times are still those of the kernels.
    """
    arch = BUILDS.get(implementation)
    if arch is None:
        yield
        return
    with cuda.built_for(arch), set_multithreading_enabled(False):
        yield
