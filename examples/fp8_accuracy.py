"""What FP8 costs attention in accuracy: errors of a call in e4m3 and in bfloat16, with outliers and with a rotation.

On a CPU, emulated: inputs are quantized by fk.quantize_fp8, and probabilities are rounded as the Hopper kernel rounds
them, to e4m3 after a multiplication by 2^8. Sums are float32. The error is the root of the mean square of the
difference to float64, over that of the result.

    python examples/fp8_accuracy.py            # the table, as in the package's README
    python examples/fp8_accuracy.py --readme   # write it there
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import flashkernel as fk

README = Path(__file__).resolve().parent.parent / "flashkernel/ops/attention/fp8/README.md"
BEGIN, END = "<!-- fp8-accuracy -->", "<!-- /fp8-accuracy -->"
HEADROOM = 256.0


def gaussian(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(shape), torch.randn(shape), torch.randn(shape)


def spikes(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """One number in a thousand is ten times as wide, anywhere."""
    q, k, v = (torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 1e-3) for _ in range(3))
    return q, k, v


def channels(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Two channels of q and the same of k are large: products are theirs."""
    q, k, v = gaussian(shape)
    for x in (q, k):
        x[..., [3, 40]] *= 6
    return q, k, v


def key_bias(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Two channels of k have a large mean, which the softmax does not see."""
    q, k, v = gaussian(shape)
    k[..., [3, 40]] += 20
    return q, k, v


INPUTS: dict[str, Callable[[tuple[int, ...]], tuple[Tensor, Tensor, Tensor]]] = {
    "normal": gaussian, "0.1% spikes": spikes, "outlier channels in q and k": channels,
    "key channels with a mean": key_bias,
}  # fmt: skip


def softmax_times(scores: Tensor, v: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """softmax(scores) v for (heads, queries, keys) and (heads, keys, dim), the weights rounded before the product."""
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return rounded(weights) @ v / weights.sum(-1, keepdim=True)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x[0].transpose(0, 1).double() for x in (q, k, v))
    return softmax_times(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, v, lambda p: p)


def in_bfloat16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x[0].transpose(0, 1).bfloat16().float() for x in (q, k, v))
    return softmax_times(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5, v, lambda p: p.bfloat16().float()).bfloat16()


def widened(values: Tensor, scale: Tensor) -> Tensor:
    """(heads, sequence, dim) of a quantized (1, sequence, heads, dim)."""
    factor = scale[0, :, None] if scale.ndim == 2 else scale[0].repeat_interleave(128, 1)[:, : values.shape[1]]
    return values[0].transpose(0, 1).float() * factor[..., None]


def in_fp8(q: Tensor, k: Tensor, v: Tensor, block: int | None, rotate: bool) -> Tensor:
    q, k = (widened(*fk.quantize_fp8(x, block, rotate)) for x in (q, k))
    v = widened(*fk.quantize_fp8(v, block))
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    return softmax_times(scores, v, lambda p: (p * HEADROOM).to(torch.float8_e4m3fn).float() / HEADROOM).bfloat16()


def errors(length: int, heads: int, head_dim: int) -> dict[str, dict[str, float]]:
    """By kind of input and by arithmetic, the relative error."""
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"bf16": in_bfloat16}
    for block in (None, 128):
        for rotate in (False, True):
            name = f"fp8, a scale a {'head' if block is None else 'block'}{', rotated' if rotate else ''}"
            ways[name] = lambda q, k, v, block=block, rotate=rotate: in_fp8(q, k, v, block, rotate)
    found: dict[str, dict[str, float]] = {}
    for kind, draw in INPUTS.items():
        torch.manual_seed(0)
        q, k, v = (x.bfloat16().float() for x in draw((1, length, heads, head_dim)))
        right = exact(q, k, v)
        found[kind] = {name: float((way(q, k, v) - right).norm() / right.norm()) for name, way in ways.items()}
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(found.values())))
    lines = [f"| inputs | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
    lines += [f"| {kind} | {' | '.join(f'{row[name]:.2%}' for name in names)} |" for kind, row in found.items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--readme", action="store_true", help="write the table into the package's README")
    given = parser.parse_args(arguments)
    found = errors(given.length, given.heads, given.head_dim)
    size = f"{given.heads} heads of {given.head_dim}, {given.length} keys"
    text = f"{size}, by `examples/fp8_accuracy.py`:\n\n{table(found)}"
    print(text)
    if given.readme:
        before, rest = README.read_text().split(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    return found


if __name__ == "__main__":
    main()
