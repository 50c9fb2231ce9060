"""Whether a tensor's values can be looked at on the host."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_values(x: Tensor) -> bool:
    """False under torch.compile, for tensors on the meta device, and under FakeTensorMode: there are only shapes."""
    return not (torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor))
