"""Captures calls into CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def capture(run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """(graph, what a call returns inside it), after two calls on the stream that it is captured on."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        captured = run()
    return graph, captured
