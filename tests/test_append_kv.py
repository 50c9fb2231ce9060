"""What the table cannot say of the write into pages: independent formulas, codes bit by bit, wrong inputs, graphs."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import flashkernel as fk
from flashkernel.blocks.codec_triton import encode_e4m3, encode_int8
from flashkernel.core import tune
from flashkernel.core.check import verify
from flashkernel.core.head_configs import HeadSplit
from flashkernel.ops.append_kv.baselines import eager
from flashkernel.ops.append_kv.configs import APPEND
from flashkernel.ops.append_kv.spec import APPEND_KV

BACKENDS = ["reference", "torch", "triton"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
by_backend = pytest.mark.parametrize("backend", BACKENDS)
on_devices = pytest.mark.parametrize("device", DEVICES)
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def _new(tokens: int = 5, heads: int = 2, dim: int = 16, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn((tokens, heads, dim), generator=torch.Generator().manual_seed(seed)).to(device)


def _pages(pages: int = 3, size: int = 16, heads: int = 2, dim: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn((pages, size, heads, dim), generator=torch.Generator().manual_seed(9))
    return values.to(dtype)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@by_backend
def test_each_token_lies_in_its_slot_and_nothing_else_changes(backend: str) -> None:
    k, v, k_pages, v_pages = _new(), _new(seed=1), _pages(), -_pages()
    slots = torch.tensor([33, -1, 0, 47, 16])
    before = k_pages.clone(), v_pages.clone()
    assert fk.append_kv(k, v, k_pages, v_pages, slots, backend=backend) is None
    for pages, old, new in ((k_pages, before[0], k), (v_pages, before[1], v)):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                old[slot // 16, slot % 16] = new[token]
        assert torch.equal(pages, old)


@by_backend
def test_slots_outside_the_pages_are_not_written(backend: str) -> None:
    k, pages = _new(), _pages()
    before = pages.clone()
    slots = torch.tensor([48, -1, -48, 2**40, -(2**40)])
    fk.append_kv(k, k, pages, pages.clone(), slots, backend=backend)
    assert torch.equal(pages, before)


@by_backend
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_that_of_rope(backend: str, interleaved: bool) -> None:
    """Keys in the pages and the q given back are what `rope` makes of them."""
    frequencies, positions = fk.Frequencies.plain(12), torch.tensor([3, 0, 900, 7, 7])
    q, k, v = _new(heads=4, seed=2), _new(), _new(seed=1)
    expected_q, expected_k = fk.rope(
        q[None], k[None], positions=positions, frequencies=frequencies, interleaved=interleaved, backend="reference"
    )
    slots = torch.tensor([1, 18, 5, 40, 2])
    q_before = q.clone()
    for angles in ({"frequencies": frequencies}, dict(zip(("cos", "sin"), frequencies.table(901)))):
        k_pages, v_pages = _pages(), _pages()
        got = fk.append_kv(
            k, v, k_pages, v_pages, slots, q=q, positions=positions, interleaved=interleaved, backend=backend, **angles
        )
        assert got is not None
        torch.testing.assert_close(got, expected_q[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(k_pages.flatten(0, 1)[slots], expected_k[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(v_pages.flatten(0, 1)[slots], v)
    assert torch.equal(q, q_before)


@triton.jit
def _encode(source, codes, count, INTEGER: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + place, mask=place < count, other=0.0)
    if INTEGER:
        tl.store(codes + place, encode_int8(values), mask=place < count)
    else:
        tl.store(codes + place, encode_e4m3(values), mask=place < count)


@on_devices
def test_e4m3_codes_are_torchs(device: str) -> None:
    """Every float16 within the range, every tie between neighbors and its neighbors, subnormals, zeros, NaN."""
    every = torch.arange(0, 2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    codes = torch.arange(0, 0x7F, dtype=torch.uint8).view(FP8).float()
    ties = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([torch.nextafter(ties, torch.tensor(float(way))) for way in (0, 1e9)])
    tiny = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 2.0**-10, 2.0**-10 * 1.0001, 448.0, 463.9, float("nan")])
    values = torch.cat((every[every.abs() <= 448], ties, -ties, near, -near, tiny)).to(device)
    got = torch.empty(values.shape, dtype=torch.uint8, device=device)
    _encode[(triton.cdiv(values.numel(), 4096),)](values, got, values.numel(), INTEGER=False, BLOCK=4096)
    expected = values.clamp(-448, 448).to(FP8)
    same = got == expected.view(torch.uint8)
    assert bool((same | values.isnan()).all()), values[~same][:5]
    assert bool(got[values.isnan()].view(FP8).float().isnan().all())


@on_devices
def test_int8_codes_round_to_even(device: str) -> None:
    ties = torch.arange(-127.5, 128.0)
    values = torch.cat((ties, torch.nextafter(ties, torch.tensor(0.0)), torch.linspace(-127, 127, 3001))).to(device)
    got = torch.empty(values.shape, dtype=torch.int8, device=device)
    _encode[(triton.cdiv(values.numel(), 4096),)](values, got, values.numel(), INTEGER=True, BLOCK=4096)
    assert torch.equal(got, values.round().clamp(-127, 127).to(torch.int8))


@by_backend
@pytest.mark.parametrize("dtype, most", [(FP8, 448.0), (INT8, 127.0)], ids=["fp8", "int8"])
def test_codes_and_scales_bit_by_bit(backend: str, dtype: torch.dtype, most: float) -> None:
    """scale = largest / most and code = value / scale, rounded once, from an independent loop over heads."""
    k, v = _new(dim=24) * 3, _new(dim=24, seed=1)
    k_pages, v_pages = _pages(dim=24, dtype=dtype), _pages(dim=24, dtype=dtype)
    k_scale, v_scale = torch.full((3, 16, 2), -1.0), torch.full((3, 16, 2), -1.0)
    slots = torch.tensor([4, 47, -1, 16, 0])
    before = k_pages.clone()
    fk.append_kv(k, v, k_pages, v_pages, slots, k_scale=k_scale, v_scale=v_scale, backend=backend)
    for token, slot in enumerate(slots.tolist()):
        for head in range(2) if slot >= 0 else ():
            for x, pages, scales in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
                scale = x[token, head].abs().max() / most
                codes = x[token, head] / scale
                codes = (codes.round() if dtype == INT8 else codes).clamp(-most, most).to(dtype)
                assert scales[slot // 16, slot % 16, head] == scale
                assert torch.equal(_bits(pages[slot // 16, slot % 16, head]), _bits(codes))
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert torch.equal(_bits(k_pages.flatten(0, 1)[untouched]), _bits(before.flatten(0, 1)[untouched]))
    assert bool((k_scale.flatten(0, 1)[untouched] == -1).all())


@pytest.mark.parametrize("pages", ["fp8", "int8"])
def test_the_eager_baseline_is_right_for_quantized_pages(pages: str) -> None:
    """Its scales are those of keys rotated in float32, as the reference has them."""
    found = next(case for case in APPEND_KV.benches if case.name == f"{pages}-16384-32/8x128").at(tokens=16, pages=64)
    reports = verify(APPEND_KV, found, torch.bfloat16, eager(APPEND_KV, found), "cpu")
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)


@by_backend
@pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])
def test_heads_of_zeros_tiny_values_and_nan(backend: str, dtype: torch.dtype) -> None:
    """Zeros stay zeros, the smallest numbers do not overflow, and a NaN is not hidden by its code."""
    k = torch.zeros((4, 1, 8))
    k[1] = torch.linspace(-1, 1, 8) * 1e-44
    k[2, 0, 3], k[3, 0, 2] = float("nan"), 1e38
    pages, scale = [_pages(1, 16, 1, 8, dtype) for _ in range(2)], [torch.zeros((1, 16, 1)) for _ in range(2)]
    fk.append_kv(k, k, *pages, torch.arange(4), k_scale=scale[0], v_scale=scale[1], backend=backend)
    held = (pages[0].float() * scale[0][..., None])[0, :4]
    assert bool((held[0] == 0).all())
    assert bool(held[1].isfinite().all())
    assert bool(held[2].isnan().any())
    assert held[3, 0, 2] == pytest.approx(1e38, rel=1e-5)


@by_backend
def test_other_strides_and_page_sizes(backend: str) -> None:
    """Keys and values in one storage, side by side; and a contiguous cache as pages of one sequence each."""
    k, v, slots = _new(), _new(seed=1), torch.tensor([35, 3, 20, 7, 0])
    both = torch.zeros((3, 2, 16, 2, 16))
    fk.append_kv(k, v, both[:, 0], both[:, 1], slots, backend=backend)
    assert torch.equal(both[slots // 16, 0, slots % 16], k)
    assert torch.equal(both[slots // 16, 1, slots % 16], v)
    k_cache, v_cache = torch.zeros((2, 21, 2, 16)), torch.zeros((2, 21, 2, 16))
    fk.append_kv(k, v, k_cache, v_cache, slots, backend=backend)
    assert torch.equal(k_cache.flatten(0, 1)[slots], k)
    assert torch.equal(v_cache.flatten(0, 1)[slots], v)
    turned = k.transpose(1, 2).contiguous().transpose(1, 2)  # no unit stride in a head
    pages = [_pages(), _pages()]
    fk.append_kv(turned, turned, *pages, slots, backend=backend)
    assert torch.equal(pages[0].flatten(0, 1)[slots], k)


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_any_split_of_the_heads(splits: int) -> None:
    """More programs than there are key heads, or fewer: the same result."""
    frequencies, positions, slots = fk.Frequencies.plain(16), torch.arange(5), torch.tensor([9, -1, 30, 2, 17])
    q, k = _new(heads=5, seed=2), _new(heads=3)
    results = []
    for backend in ("torch", "triton"):
        pages, scale = [_pages(heads=3, dtype=INT8) for _ in range(2)], [torch.zeros((3, 16, 3)) for _ in range(2)]
        with tune.override(APPEND, HeadSplit(splits, 1)):
            turned = fk.append_kv(
                k, k, *pages, slots, k_scale=scale[0], v_scale=scale[1], q=q, positions=positions,
                frequencies=frequencies, backend=backend,
            )  # fmt: skip
        results.append((turned, *(codes.float() * unit[..., None] for codes, unit in zip(pages, scale))))
    for mine, own in zip(results[1], results[0]):
        torch.testing.assert_close(mine, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, FP8, INT8], ids=["float32", "fp8", "int8"])
@on_devices
def test_compiles_without_graph_breaks(backend: str, dtype: torch.dtype, device: str) -> None:
    """Pages written inside a compiled graph are those written outside of it, also where the graph reads them after."""
    k, slots = _new(device=device), torch.tensor([33, -1, 0, 47, 16], device=device)
    frequencies, positions = fk.Frequencies.plain(16), torch.arange(5, device=device)

    def step(k: Tensor, k_pages: Tensor, v_pages: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> Tensor:
        q = fk.append_kv(
            k * 2, k, k_pages, v_pages, slots, k_scale=k_scale, v_scale=v_scale, q=k, positions=positions,
            frequencies=frequencies, backend=backend,
        )  # fmt: skip
        return q + v_pages.float().sum()

    outcomes = []
    compiler = "aot_eager" if device == "cpu" else "inductor"
    for function in (step, torch.compile(step, fullgraph=True, backend=compiler)):
        pages = [_pages(dtype=dtype).to(device) for _ in range(2)]
        quantized = dtype != torch.float32
        scales = [torch.zeros((3, 16, 2), device=device) if quantized else None for _ in range(2)]
        outcomes.append((function(k, *pages, *scales), *(page.float() for page in pages)))
    for got, expected in zip(outcomes[1], outcomes[0]):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_autograd_notices_the_write_and_no_gradient_is_promised() -> None:
    k, pages = _new(), _pages()
    slots = torch.arange(5)
    for backend in BACKENDS:
        version = pages._version
        fk.append_kv(k, k, pages, pages.clone(), slots, backend=backend)
        assert pages._version > version
        with pytest.raises(ValueError, match="it has no gradient"):
            fk.append_kv(k.clone().requires_grad_(), k, pages, pages.clone(), slots, backend=backend)
        with torch.no_grad():
            fk.append_kv(k.clone().requires_grad_(), k, pages, pages.clone(), slots, backend=backend)
    with torch.inference_mode():
        inner = _pages()
        fk.append_kv(k, k, inner, inner.clone(), slots, backend="triton")
        assert torch.equal(inner.flatten(0, 1)[:5], k)


_K, _P, _S = _new(), _pages(), torch.arange(5)
_TABLE = (torch.ones(9, 8), torch.zeros(9, 8))
_SCALE = torch.zeros(3, 16, 2)
WRONG = {
    "k of four dims": ((_K[None], _K, _P, _P, _S), {}, r"k must be a float tensor \(tokens, kv_heads, head_dim\)"),
    "integers": ((_K.int(), _K, _P, _P, _S), {}, "not torch.int32"),
    "v of other tokens": ((_K, _K[:3], _P, _P, _S), {}, r"v has shape \(3, 2, 16\)"),
    "v of another dtype": ((_K, _K.half(), _P, _P, _S), {}, "v is torch.float16"),
    "too few slots": ((_K, _K, _P, _P, _S[:3]), {}, r"for 5 tokens they must be int64 or int32 \(5,\)"),
    "slots as floats": ((_K, _K, _P, _P, _S.float()), {}, "slots are torch.float32"),
    "pages of other heads": ((_K, _K, _P[:, :, :1], _P, _S), {}, r"must be \(pages, page_size, 2, 16\)"),
    "pages of three dims": ((_K, _K, _P[0], _P, _S), {}, "k_pages have shape"),
    "pages in int32": ((_K, _K, _P.int(), _P.int(), _S), {}, "float dtype or int8"),
    "pages that differ": ((_K, _K, _P, _P[:2], _S), {}, "the same place in both"),
    "pages of two dtypes": ((_K, _K, _P, _P.half(), _S), {}, "the same place in both"),
    "scattered pages": ((_K, _K, _P.transpose(2, 3).contiguous().transpose(2, 3), _P, _S), {}, "side by side"),
    "no scale": ((_K, _K, _P.to(FP8), _P.to(FP8), _S), {}, "need k_scale; give it"),
    "a scale too many": ((_K, _K, _P, _P, _S), {"k_scale": _SCALE}, "have no use for k_scale; leave it out"),
    "a scale of another shape": (
        (_K, _K, _P.to(INT8), _P.to(INT8), _S), {"k_scale": _SCALE[:2], "v_scale": _SCALE}, r"float32 \(3, 16, 2\)",
    ),
    "q without angles": ((_K, _K, _P, _P, _S), {"q": _K}, "there to rotate"),
    "positions without angles": ((_K, _K, _P, _P, _S), {"positions": _S}, "there to rotate"),
    "angles without positions": (
        (_K, _K, _P, _P, _S), {"frequencies": fk.Frequencies.plain(16)}, "positions are missing",
    ),
    "a table without sin": ((_K, _K, _P, _P, _S), {"cos": _TABLE[0], "positions": _S}, "sin is missing"),
    "both kinds of angles": (
        (_K, _K, _P, _P, _S),
        {"cos": _TABLE[0], "sin": _TABLE[1], "positions": _S, "frequencies": fk.Frequencies.plain(16)}, "not both",
    ),
    "positions of other tokens": (
        (_K, _K, _P, _P, _S), {"cos": _TABLE[0], "sin": _TABLE[1], "positions": _S[:2]}, "for 5 tokens they must",
    ),
    "a table of unequal halves": (
        (_K, _K, _P, _P, _S), {"cos": _TABLE[0], "sin": _TABLE[1][:3], "positions": _S}, "both must be float",
    ),
    "a table by other tokens": (
        (_K, _K, _P, _P, _S), {"cos": torch.ones(1, 4, 16), "sin": torch.ones(1, 4, 16)}, r"\(1, 5, columns\)",
    ),
    "by token, with positions": (
        (_K, _K, _P, _P, _S), {"cos": torch.ones(1, 5, 16), "sin": torch.ones(1, 5, 16), "positions": _S}, "no use for",
    ),
    "too wide a rotation": (
        (_K, _K, _P, _P, _S), {"frequencies": fk.Frequencies.plain(32), "positions": _S}, "append_kv: cannot rotate 32",
    ),
    "q of another head_dim": (
        (_K, _K, _P, _P, _S),
        {"q": _K[..., :8], "frequencies": fk.Frequencies.plain(8), "positions": _S}, "q has shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_refused(name: str) -> None:
    arguments, options, message = WRONG[name]
    before = _bits(arguments[2]).clone()
    with pytest.raises(ValueError, match=message) as refusal:
        fk.append_kv(*arguments, **options)
    assert str(refusal.value).startswith("append_kv: ")
    assert torch.equal(_bits(arguments[2]), before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, FP8, INT8], ids=["float16", "fp8", "int8"])
def test_cuda_graph_with_padding(dtype: torch.dtype) -> None:
    """A captured step replays on new tokens and slots; padded ones are not written."""
    k, slots = _new(dim=64, device="cuda").half(), torch.full((5,), -1, device="cuda")
    positions, frequencies = torch.zeros(5, dtype=torch.int32, device="cuda"), fk.Frequencies.plain(64)
    pages = [torch.zeros((3, 16, 2, 64), device="cuda").to(dtype) for _ in range(2)]
    scales = [torch.zeros((3, 16, 2), device="cuda") if dtype.itemsize == 1 else None for _ in range(2)]

    def step(target: list[Tensor], units: list[Tensor | None], backend: str | None = None) -> Tensor | None:
        return fk.append_kv(
            k, k, *target, slots, k_scale=units[0], v_scale=units[1], q=k, positions=positions,
            frequencies=frequencies, backend=backend,
        )  # fmt: skip

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(pages, scales)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        turned = step(pages, scales)
    expected = [page.clone() for page in pages], [None if scale is None else scale.clone() for scale in scales]
    for seed, place in enumerate(([3, 20, -1, 40, -1], [4, 21, 46, -1, -1])):
        k.copy_(_new(dim=64, seed=seed))
        slots.copy_(torch.tensor(place))
        positions.copy_(torch.arange(5) + seed)
        graph.replay()
        own = step(*expected, backend="torch")
        torch.testing.assert_close(turned, own, rtol=2e-3, atol=2e-3)
        for mine, theirs, unit, own_unit in zip(pages, expected[0], scales, expected[1]):
            values = mine.float() if unit is None else mine.float() * unit[..., None]
            wanted = theirs.float() if own_unit is None else theirs.float() * own_unit[..., None]
            torch.testing.assert_close(values, wanted, rtol=0.07 if dtype == FP8 else 0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.alone
def test_pages_beyond_two_to_the_31_elements() -> None:
    """The last slot of three gigabytes of codes."""
    pages = [torch.zeros((3 * 2**30 // (256 * 8 * 128), 256, 8, 128), dtype=INT8, device="cuda") for _ in range(2)]
    scales = [torch.zeros(pages[0].shape[:3], device="cuda") for _ in range(2)]
    k = _new(1, 8, 128, device="cuda")
    last = pages[0].shape[0] * 256 - 1
    fk.append_kv(k, k, *pages, torch.tensor([last], device="cuda"), k_scale=scales[0], v_scale=scales[1])
    held = pages[0][-1, -1].float() * scales[0][-1, -1, :, None]
    torch.testing.assert_close(held, k[0], rtol=0, atol=0.02)
    assert int(pages[0].count_nonzero()) == int(pages[0][-1, -1].count_nonzero())
