"""Which calls of attention each backend supports, and why not the others."""

from __future__ import annotations

import torch

from flashkernel.core.op import Call
from flashkernel.ops.attention.configs import too_wide

FEW_KEYS = 384  # seen by a tile of queries at most: loops that end before a warp-specialized pipeline is full


def triton(call: Call) -> str | None:
    """Why the Triton kernels do not support a call; None where they do."""
    widest = max(call.facts["head_dim"], call.facts["value_dim"])
    if widest > 512:
        return f"heads must be at most 512 wide, not {widest}"
    if widest > 128 and call.dtype == torch.float32 and call.device.kind == "cuda":
        return f"in float32 heads of {widest} leave no registers: kernels would take minutes to compile, and spill"
    reason = too_wide(call.device, call.facts["head_dim"], call.facts["value_dim"], call.dtype.itemsize)
    if reason is not None:
        return f"heads of {widest} are too wide in {str(call.dtype).removeprefix('torch.')}: {reason}"
    if call.facts["deterministic"] and call.facts["has_bias"]:
        return "the gradient of a bias is added by atomics, in no fixed order; leave deterministic off or the bias out"
    return None


def hopper(call: Call) -> str | None:
    """The same of the Hopper kernels."""
    head_dim, value_dim = call.facts["head_dim"], call.facts["value_dim"]
    if max(head_dim, value_dim) > 256 or head_dim % 8 or value_dim % 8:
        return f"heads must be multiples of 8 and at most 256 wide, not {head_dim} and {value_dim}"
    for fact, what in (
        ("has_score", "a score function"), ("has_bias", "a bias"), ("has_slopes", "ALiBi"), ("has_dropout", "dropout"),
    ):  # fmt: skip
        if call.facts[fact]:
            return f"it has no {what.removeprefix('a ')}"
    return None


def cuda(call: Call) -> str | None:
    """The same of the CUDA C++ kernels."""
    head_dim, value_dim = _widths(call)
    if head_dim % 8 or value_dim % 8:
        return f"it loads 16 bytes at a time: heads must be multiples of 8, not {head_dim} and {value_dim}"
    most = 128 if call.gradients else 256
    if max(head_dim, value_dim) > most:
        which = "with gradients heads" if call.gradients else "heads"
        return f"{which} must be at most {most} wide, not {head_dim} and {value_dim}"
    if max(head_dim, value_dim) > 128 and (call.facts["has_bias"] or call.facts["has_dropout"]):
        return (
            f"with a bias or dropout, heads of {max(head_dim, value_dim)} leave no registers; they must be at most 128"
        )
    if call.facts["deterministic"] and call.gradients:
        return "the gradient of q is added by atomics, in no fixed order; leave deterministic off"
    return None


def slower_than_triton(call: Call) -> str | None:
    """Why the Triton kernels are preferred to the Hopper kernels, which support a call; None where they are not."""
    reason = unmeasured(call)
    if reason is not None:
        return reason
    if call.facts["has_tables"]:  # they are known on the device only
        return "its mask has tables, so that the tile schedule cannot be made in advance"
    if call.facts["few_keys"] and not call.gradients and max(_widths(call)) > 64:
        return f"each tile of queries sees at most {FEW_KEYS} keys, where the portable forward kernel is faster"
    return None


def unmeasured(call: Call) -> str | None:
    """Why the Hopper kernels, which support a call, are not selected before their speed has been measured."""
    if call.facts["deterministic"] and call.gradients:
        return "its deterministic gradients have not been measured on a GPU yet"
    return None


def _widths(call: Call) -> tuple[int, int]:
    return call.facts["head_dim"], call.facts["value_dim"]
