"""The CUDA C++ attention backward pass on the emulator, against torch's autograd in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks import mask as masks
from flashkernel.core import tune
from flashkernel.ops.attention.cuda.backward_configs import BACKWARD, BackwardConfig
from flashkernel.ops.attention.cuda.backward_launch import backward
from flashkernel.ops.attention.params import AttentionInputs, AttentionParams, OutputGradients
from flashkernel.ops.attention.reference import attention as reference
from tests.cuda_emulator import emulated, unavailable
from tests.in_turn import in_turn

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
ARCHS = (75, 80)


class Call(NamedTuple):
    """An attention call: sizes, options and which tensors it has."""

    batch: int = 1
    seqlen_q: int = 100
    seqlen_k: int = 100
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.float16
    mask: masks.Mask | None = None
    scale: float | None = None
    softcap: float = 0.0
    score: Callable[..., Any] | None = None
    dropout: float = 0.0
    bias: tuple[int, ...] | None = None  # its shape
    sinks: bool = False
    slopes: int = 0  # dims
    dlse: bool = False


def _inputs(call: Call, generator: torch.Generator) -> AttentionInputs:
    def normal(*shape: int, dtype: torch.dtype = call.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q = normal(call.batch, call.seqlen_q, call.heads, call.head_dim)
    k = normal(call.batch, call.seqlen_k, call.kv_heads, call.head_dim)
    v = normal(call.batch, call.seqlen_k, call.kv_heads, call.value_dim)
    bias = None if call.bias is None else normal(*call.bias)
    sinks = normal(call.heads) if call.sinks else None
    shape = (call.heads,) if call.slopes == 1 else (call.batch, call.heads)
    slopes = torch.rand(shape, generator=generator) / 4 if call.slopes else None
    return AttentionInputs(q, k, v, bias, sinks, slopes)


class Expected(NamedTuple):
    o: Tensor
    lse: Tensor
    gradients: list[Tensor | None]


def _expected(call: Call, inputs: AttentionInputs, do: Tensor, dlse: Tensor | None, dtype: torch.dtype) -> Expected:
    """O, LSE and gradients by torch's autograd, computed in `dtype`."""
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
    q, k, v, bias, sinks, slopes = leaves
    assert q is not None
    assert k is not None
    assert v is not None
    o, lse = reference(
        q, k, v, bias, sinks, slopes, mask=call.mask, scale=call.scale, softcap=call.softcap, score=call.score,
        dropout=call.dropout, seed=7, return_lse=True,
    )  # fmt: skip
    outputs, upstream = [o], [do.to(o.dtype)]
    if dlse is not None:
        finite = lse != -math.inf
        outputs.append(lse[finite])
        upstream.append(dlse.to(lse.dtype)[finite])
    given = [x for x in leaves if x is not None]
    found = torch.autograd.grad(outputs, given, upstream, allow_unused=True)
    gradients = iter(torch.zeros_like(x) if g is None else g for x, g in zip(given, found))
    return Expected(o.detach().contiguous(), lse.detach(), [None if x is None else next(gradients) for x in leaves])


def _check(call: Call, arch: int, config: BackwardConfig | None = None) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = _inputs(call, generator)
    do = torch.randn((call.batch, call.seqlen_q, call.heads, call.value_dim), generator=generator).to(call.dtype)
    dlse = torch.randn((call.batch, call.heads, call.seqlen_q), generator=generator) if call.dlse else None
    expected = _expected(call, inputs, do, dlse, torch.float64)
    rounded = _expected(call, inputs, do, dlse, call.dtype)
    scale = 1 / math.sqrt(call.head_dim) if call.scale is None else call.scale
    score = None if call.score is None else ex.trace_score(call.score)
    params = AttentionParams(call.mask, scale, call.softcap, score, call.dropout, 7)
    override = tune.override(BACKWARD, config) if config is not None else torch.enable_grad()
    with emulated(arch), override:
        outputs = OutputGradients(expected.o.to(call.dtype), expected.lse.float(), do, dlse)
        actual = backward(outputs, inputs, params, inputs.bias is not None)
    for name, x, found, truth, torch_own in zip(
        AttentionInputs._fields, inputs, actual, expected.gradients, rounded.gradients
    ):
        if x is None:
            assert found is None, name
            continue
        assert found is not None, name
        assert truth is not None
        assert torch_own is not None
        assert (found.dtype, found.shape) == (x.dtype, x.shape), name
        assert found.isfinite().all(), name
        # As FlashAttention tests it: not more than twice the error of torch in the same dtype.
        if x.numel() == 0:
            continue
        error, own_error = ((y.double() - truth).abs().max().item() for y in (found, torch_own))
        unit = torch.finfo(call.dtype).eps * max(1.0, truth.abs().max().item())
        assert error <= 2 * own_error + unit, f"{name}: error {error:.3g}, torch's own {own_error:.3g}"


MASKS: dict[str, Callable[[], masks.Mask | None]] = {
    "none": lambda: None,
    "causal": masks.causal,
    "window": lambda: masks.window(40, 10),
    "window of the past": lambda: masks.window(30, 0),
    "sink tokens": lambda: masks.window(20, 0) | masks.sink_tokens(4),
    "prefix": lambda: masks.causal() | masks.prefix(30),
    "prefixes": lambda: masks.causal() | masks.prefix(torch.tensor([20, 70])),
    "later keys": lambda: masks.custom(lambda b, h, q, k: k > q + 60),  # many queries see nothing
    "heads": lambda: masks.custom(lambda b, h, q, k: (k <= q + 16 * h) & ((q + k + b) % 3 != 0)),
}


@pytest.mark.parametrize("name, arch", in_turn(MASKS, ARCHS))
def test_masks(name: str, arch: int) -> None:
    _check(Call(batch=2, seqlen_q=150, seqlen_k=170, mask=MASKS[name](), dlse=True), arch)


SIZES = [
    Call(seqlen_q=1, seqlen_k=1),
    Call(seqlen_q=1, seqlen_k=300),
    Call(seqlen_q=200, seqlen_k=3),
    Call(seqlen_q=128, seqlen_k=256, mask=masks.causal()),
    Call(seqlen_q=256, seqlen_k=128, mask=masks.causal()),  # the first queries see nothing
    Call(head_dim=128, value_dim=128, seqlen_q=130, seqlen_k=270, mask=masks.causal()),
    Call(head_dim=128, value_dim=64, seqlen_q=70, seqlen_k=90),
    Call(head_dim=64, value_dim=128, seqlen_q=70, seqlen_k=90),
    Call(head_dim=72, value_dim=40, seqlen_q=70, seqlen_k=90, mask=masks.causal()),
    Call(head_dim=8, value_dim=104, seqlen_q=33, seqlen_k=65),
    Call(batch=2, heads=6, kv_heads=2, seqlen_q=90, seqlen_k=140, mask=masks.causal()),
    Call(heads=4, kv_heads=1, head_dim=128, value_dim=128, mask=masks.custom(lambda b, h, q, k: k <= q - 20 * h)),
]


@pytest.mark.parametrize("index, arch", in_turn(range(len(SIZES)), ARCHS))
def test_sizes(index: int, arch: int) -> None:
    _check(SIZES[index], arch)


OPTIONS = {
    "sinks": Call(sinks=True, heads=4, mask=masks.causal(), dlse=True),
    "slopes": Call(slopes=1, heads=4, seqlen_k=140, mask=masks.causal(), dlse=True),
    "slopes of each batch": Call(batch=2, slopes=2),
    "softcap": Call(softcap=2.0, mask=masks.causal()),
    "softcap and slopes": Call(softcap=2.0, slopes=1, sinks=True),
    "score": Call(score=lambda score, b, h, q, k: score * 0.5 - (q - k) * 0.01, mask=masks.causal()),
    "score of its own": Call(score=lambda score, b, h, q, k: score * score * 0.3, slopes=1),
    "bias": Call(batch=2, bias=(2, 2, 100, 100)),
    "bias over heads": Call(batch=2, bias=(2, 1, 100, 100), kv_heads=1, mask=masks.causal()),
    "bias over queries": Call(batch=2, bias=(1, 2, 1, 100), softcap=3.0),
    "bias over keys": Call(batch=2, bias=(1, 1, 100, 1)),
    "dropout": Call(dropout=0.3, batch=2, mask=masks.causal(), dlse=True),
    "dropout and all": Call(dropout=0.2, softcap=4.0, slopes=1, sinks=True, bias=(1, 2, 100, 100), dlse=True),
    "negative scale": Call(scale=-0.2, mask=masks.causal()),
    "scale of zero": Call(scale=0.0),
}


@pytest.mark.parametrize("name, arch", in_turn(OPTIONS, ARCHS))
def test_options(name: str, arch: int) -> None:
    _check(OPTIONS[name], arch)


def test_bfloat16() -> None:
    _check(Call(dtype=torch.bfloat16, mask=masks.causal(), sinks=True), 80)
    _check(Call(dtype=torch.bfloat16, head_dim=128, value_dim=128, heads=4), 80)


CONFIGS = [
    (80, 64, BackwardConfig(64, 64, 2, 2, min_blocks=3)),
    (80, 64, BackwardConfig(64, 128, 4, 2)),
    (80, 64, BackwardConfig(32, 128, 4, 1)),
    (80, 64, BackwardConfig(64, 64, 4, 1, do_stages=1)),
    (80, 128, BackwardConfig(64, 64, 4, 2, do_stages=1)),
    (80, 128, BackwardConfig(32, 64, 2, 2)),
    (75, 64, BackwardConfig(64, 64, 2, 2, 1, 1)),
    (75, 64, BackwardConfig(64, 64, 4, 1, 1, 1)),
    (75, 128, BackwardConfig(32, 64, 4, 1, 1, 1)),
    (75, 128, BackwardConfig(32, 64, 2, 2, 1, 1)),
]


@pytest.mark.parametrize("arch, dim, config", CONFIGS)
def test_configs(arch: int, dim: int, config: BackwardConfig) -> None:
    _check(Call(seqlen_q=150, seqlen_k=170, head_dim=dim, value_dim=dim, mask=masks.causal(), kv_heads=1), arch, config)


@pytest.mark.parametrize("arch", ARCHS)
def test_hidden_by_bias(arch: int) -> None:
    """A bias of -inf hides a pair, and a row of them a whole query: its gradients are zero, not NaN."""
    call = Call(seqlen_q=40, seqlen_k=50)
    generator = torch.Generator().manual_seed(0)
    inputs = _inputs(call, generator)
    bias = torch.zeros(1, 1, 40, 50, dtype=call.dtype)
    bias[..., 3, :] = -math.inf
    bias[..., 10:] = bias[..., 10:].masked_fill(torch.rand(1, 1, 40, 40, generator=generator) < 0.3, -math.inf)
    visible = bias[0, 0] == 0
    hidden = Call(seqlen_q=40, seqlen_k=50, mask=masks.tensor_mask(visible[None, None]))
    do = torch.randn((1, 40, 2, 64), generator=generator).to(call.dtype)
    expected = _expected(hidden, inputs, do, None, torch.float64)
    params = AttentionParams(None, 1 / 8, 0.0, None, 0.0, 0)
    with emulated(arch):
        outputs = OutputGradients(expected.o.to(call.dtype), expected.lse.float(), do, None)
        dq, dk, dv, dbias, _, _ = backward(outputs, inputs._replace(bias=bias), params, True)
    for found, truth in zip((dq, dk, dv), expected.gradients):
        assert truth is not None
        torch.testing.assert_close(found.double(), truth, rtol=2e-3, atol=2e-3)
    assert dbias is not None
    assert dbias.isfinite().all()
    assert (dbias[0, 0][~visible] == 0).all()
    assert (dq[:, 3] == 0).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_strides(arch: int) -> None:
    """Transposed q, k, v and dO, one of them at an address that 16-byte loads cannot read."""
    call = Call(seqlen_q=70, seqlen_k=80, heads=3, kv_heads=3, mask=masks.causal())
    generator = torch.Generator().manual_seed(0)
    inputs = _inputs(call, generator)
    do = torch.randn((1, 70, 3, 64), generator=generator).to(call.dtype)
    expected = _expected(call, inputs, do, None, torch.float64)
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:2])
    v = torch.cat([inputs.v.flatten().new_zeros(1), inputs.v.flatten()])[1:].view(inputs.v.shape)
    params = AttentionParams(call.mask, 1 / 8, 0.0, None, 0.0, 0)
    upstream = do.transpose(1, 2).contiguous().transpose(1, 2)
    outputs = OutputGradients(expected.o.to(call.dtype), expected.lse.float(), upstream, None)
    with emulated(arch):
        found = backward(outputs, inputs._replace(q=q, k=k, v=v), params, False)
    for gradient, truth in zip(found, expected.gradients):
        if gradient is not None and truth is not None:
            torch.testing.assert_close(gradient.double(), truth, rtol=2e-3, atol=3e-3)


@pytest.mark.parametrize("seqlen_q, seqlen_k, batch", [(0, 5, 1), (5, 0, 1), (5, 5, 0)])
def test_empty(seqlen_q: int, seqlen_k: int, batch: int) -> None:
    _check(Call(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, sinks=True), 80)
