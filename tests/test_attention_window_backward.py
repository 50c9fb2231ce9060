"""The backward pass under a narrow causal window in one kernel: emulated against float64; resources when compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from compiled import disassemble
from cuda_emulator import emulated
from cuda_emulator import unavailable as no_emulator
from torch import Tensor

import flashkernel as fk
from flashkernel.blocks.mask import Mask, causal, documents, sink_tokens, window
from flashkernel.core import cuda, tune
from flashkernel.core import device as devices
from flashkernel.core.check import compare
from flashkernel.lab.cuda_resources import Instance, compile_nvcc, has_nvcc, ptxas_report
from flashkernel.ops.attention import hopper
from flashkernel.ops.attention.hopper import window_backward
from flashkernel.ops.attention.hopper.backward_configs import BACKWARD, WINDOW_CONFIG, BackwardConfig
from flashkernel.ops.attention.params import AttentionInputs, AttentionParams, OutputGradients

H200 = devices.KNOWN["h200"]
needs_emulator = pytest.mark.skipif(no_emulator() is not None, reason=str(no_emulator()))
needs_nvrtc = pytest.mark.skipif(cuda.can_compile() is not None, reason=str(cuda.can_compile()))


def _params(mask: Mask | None, scale: float = 0.125, **changed: object) -> AttentionParams:
    return AttentionParams(mask, scale, 0.0, None, 0.0, 0)._replace(**changed)  # type: ignore[arg-type]


def _check(
    batch: int, length: int, heads: int, kv_heads: int, size: int, *, dtype: torch.dtype = torch.float16,
    sinks: bool = False, dlse: bool = False, sms: int = 3, inputs: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Compares all gradients, computed on so many SMs, with those in float64 and with torch's in the same dtype."""
    torch.manual_seed(length + size)
    shapes = ((batch, length, heads, 64), *[(batch, length, kv_heads, 64)] * 2)
    q, k, v = inputs or tuple(torch.randn(shape).to(dtype) for shape in shapes)
    logits = torch.randn(heads) if sinks else None
    mask, options = causal() & window(size), {"scale": 0.2, "return_lse": True}
    do, dlse_given = torch.randn(q.shape).to(q.dtype), torch.randn(batch, heads, length) if dlse else None

    def gradients(backend: str, as_dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = [x.detach().to(as_dtype).requires_grad_() for x in (q, k, v)]
        own_sinks = None if logits is None else logits.to(as_dtype).requires_grad_()
        o, lse = fk.attention(*given, mask=mask, sinks=own_sinks, backend=backend, **options)
        wanted = [*given] if own_sinks is None else [*given, own_sinks]
        outputs = [(o, do.to(as_dtype))] + ([] if dlse_given is None else [(lse, dlse_given.to(lse.dtype))])
        found = torch.autograd.grad([one for one, _ in outputs], wanted, [one for _, one in outputs])
        return o.detach(), lse.detach(), *found

    o, lse, *exact = gradients("reference", torch.float64)
    _, _, *own = gradients("torch", q.dtype)
    with emulated(90), devices.pretend(replace(H200, sms=sms)), tune.override(BACKWARD, WINDOW_CONFIG):
        dq, dk, dv, _, dsinks, _ = hopper.backward(
            OutputGradients(o.to(q.dtype).contiguous(), lse.float().contiguous(), do, dlse_given),
            AttentionInputs(q, k, v, None, logits, None), _params(mask, 0.2), False,
        )  # fmt: skip
    names = ["dq", "dk", "dv", "dsinks"]
    for name, found, right, theirs in zip(names, (dq, dk, dv, dsinks), exact, own):
        assert found is not None
        report = compare(name, found, right, theirs)
        assert report.ok, report.message


@needs_emulator
@pytest.mark.parametrize("length", [1, 63, 64, 65, 130, 200, 449])
def test_lengths(length: int) -> None:
    """Fewer positions than a block, whole and broken blocks, one chunk and several."""
    _check(1, length, 2, 1, 128, dtype=torch.bfloat16 if length == 200 else torch.float16)


@needs_emulator
@pytest.mark.parametrize("size", [1, 2, 64, 65, 100, 127, 129])
def test_windows(size: int) -> None:
    _check(1, 260, 1, 1, size)


@needs_emulator
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 3), (8, 2), (5, 1)])
def test_heads_that_share_keys(heads: int, kv_heads: int) -> None:
    _check(2, 300, heads, kv_heads, 128, sinks=True, dlse=heads == 8, sms=16)


@needs_emulator
def test_inputs_are_views() -> None:
    """Packed q, k and v, and a batch that is broadcast."""
    packed = torch.randn(2, 150, 6, 64).half()
    k = packed[:1, :, 4:5].expand(2, -1, -1, -1)
    _check(2, 150, 4, 1, 128, inputs=(packed[:, :, :4], k, packed[:, :, 5:]))


def test_what_it_serves() -> None:
    q, k = torch.empty(1, 256, 8, 64).half(), torch.empty(1, 256, 2, 64).half()
    served = window_backward.served_window
    narrow = causal() & window(128)
    assert served(q, k, k, _params(narrow)) == 128
    assert served(q, k, k, _params(window(129, 0))) == 129
    ids = torch.zeros(256, dtype=torch.int32)
    for mask in (None, causal(), window(128), causal() & window(130), narrow & documents(ids),
                 (window(128) | sink_tokens(1)) & causal(), ~narrow):  # fmt: skip
        assert served(q, k, k, _params(mask)) == 0
    assert served(q[:, :255], k, k, _params(narrow)) == 0
    assert served(q.float(), k.float(), k.float(), _params(narrow)) == 0
    assert served(q, k, k[..., :32], _params(narrow)) == 0
    assert served(q, k, k, _params(narrow, softcap=20.0)) == 0


def test_the_search_space() -> None:
    """A search times it where it serves; it is no heuristic's choice."""
    shape = {
        "seqlen_q": 16384, "seqlen_k": 16384, "mean_visible_keys": 128, "head_dim": 64, "value_dim": 64,
        "group_size": 8, "fixed_max": 1, "masked": 1, "has_tables": 0, "window": 128,
    }  # fmt: skip
    assert WINDOW_CONFIG in list(BACKWARD.space(H200, shape))
    assert BACKWARD.valid(WINDOW_CONFIG, H200, shape) is None
    assert BACKWARD.heuristic(H200, shape) != WINDOW_CONFIG
    assert WINDOW_CONFIG not in list(BACKWARD.space(H200, {**shape, "window": 0}))
    assert BACKWARD.valid(WINDOW_CONFIG, H200, {**shape, "window": 0})
    assert BACKWARD.valid(BackwardConfig(64, 2, False, False, dq_mode="window"), H200, shape)


def test_chunks_fill_the_gpu() -> None:
    assert window_backward.chunk_blocks(256, 8, 132) == 16  # 128 thread blocks
    assert window_backward.chunk_blocks(64, 32, 132) == 16
    assert window_backward.chunk_blocks(1, 8, 132) == 1


@needs_nvrtc
@pytest.mark.compile
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compiled_for_hopper(dtype: torch.dtype) -> None:
    q, k = (torch.empty(1, 4096, heads, 64, dtype=dtype, device="meta") for heads in (64, 8))
    lse_delta = torch.empty(2, 1, 64, 4096, device="meta")
    with devices.pretend(H200), cuda.recorded_launches() as launches:
        window_backward.launch(q, q, k, k, lse_delta, 128, 0.125)
    (launch,) = launches
    code = launch.kernel.module.compile(launch.kernel.name, 90)
    (taken,) = ptxas_report(code.log).values()
    assert taken["spilled"] == 0
    assert "C75" not in code.log, "wgmma is serialized, or setmaxnreg ignored"
    assert launch.shared <= H200.shared_per_block
    sass = disassemble(code.code)
    assert sass.count("HGMMA.64x64x16.F32") == 4 * 4 + 12
    assert "USETMAXREG" in sass
    assert "UTMALDG.4D" in sass
    assert not set(sass.split()) & {"STL", "LDL", "RED", "ATOM"}
    if has_nvcc():
        group = [Instance(launch.kernel, ("attention",), launch.threads, launch.shared)]
        assert all(found["spilled"] == 0 for found in compile_nvcc(group, 90).values())
