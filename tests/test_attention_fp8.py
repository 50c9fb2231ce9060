"""FP8 attention: the Hopper kernel under the emulator of Gluon, quantization and rotation, and what is refused."""

from __future__ import annotations

import importlib
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gluon_emulator
import pytest
import torch
from compiled import compiled
from gluon_emulator.instructions import inline_asm
from gluon_emulator.language import LANGUAGE
from gluon_emulator.values import as_value

import flashkernel as fk
from flashkernel.blocks.mask import causal, custom, documents, sink_tokens, window
from flashkernel.core import device as devices
from flashkernel.core import tune
from flashkernel.core.check import verify
from flashkernel.core.dispatch import explain
from flashkernel.core.launch import collect_launches
from flashkernel.core.op import Case
from flashkernel.core.versions import triton_version
from flashkernel.lab.selection import shapes_only
from flashkernel.ops.attention.fp8 import hopper
from flashkernel.ops.attention.fp8 import reference as plain
from flashkernel.ops.attention.fp8.configs import HOPPER, HopperFp8
from flashkernel.ops.attention.fp8.hopper import assembly
from flashkernel.ops.attention.fp8.quantize import rotation
from flashkernel.ops.attention.fp8.spec import ATTENTION_FP8, _axes

FP8 = torch.float8_e4m3fn


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous().view(torch.int32)


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b.double() + c.double()).float()


_FLOAT = {
    "fma.rn.f32": _fma,
    "fma.rn.sat.f32": lambda a, b, c: _fma(a, b, c).nan_to_num(0.0).clamp(0, 1),
    "sub.rn.f32": torch.sub,
    "mul.rn.f32": torch.mul,
    "ex2.approx.ftz.f32": torch.exp2,
}
_WHOLE = {
    "shl.b32": lambda a, count: (a.long() << count & 0xFFFFFFFF).to(torch.uint32).view(torch.int32),
    "add.s32": lambda a, b: a + b,
}


def _ptx(text: str, constraints: str, args: Any, dtype: torch.dtype, is_pure: bool, pack: int) -> torch.Tensor:
    """The kernel's assembly, line by line, over groups of `pack` elements. What branches skip multiplies by one."""
    if dtype in (FP8, torch.int32):
        return inline_asm(text, constraints, args, dtype, is_pure, pack)
    wide = torch.broadcast_tensors(*args)
    columns = [column for x in wide for column in x.reshape(-1, pack).unbind(1)]
    outputs = constraints.split(",").count("=f")
    assert outputs == pack
    assert len(constraints.split(",")) == outputs + len(columns)
    held: dict[str, Any] = {f"${place}": _bits(column) for place, column in enumerate(columns, outputs)}

    def value(name: str) -> Any:
        if name.startswith("0f"):
            return torch.tensor(int(name[2:], 16), dtype=torch.uint32).view(torch.int32)
        return int(name) if name.isdigit() else held[name]

    for line in text.strip("{}").replace("same:", "").split(";"):
        name, _, operands = line.strip().partition(" ")
        target, *sources = operands.split(", ")
        if name in _FLOAT:
            held[target] = _bits(_FLOAT[name](*(value(source).view(torch.float32) for source in sources)))
        elif name in _WHOLE:
            held[target] = _WHOLE[name](*map(value, sources))
        elif name.startswith("mov."):
            held[target] = value(sources[0])
        else:
            assert name.split(".")[0] in ("", "setp", "vote", "@!any"), f"unknown here: {line}"
    result = torch.stack([held[f"${place}"].view(torch.float32) for place in range(outputs)], 1)
    return as_value(result.reshape(wide[0].shape))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An H200 with 3 SMs, in the emulator."""
    monkeypatch.setattr(hopper, "launch", gluon_emulator.launch)
    monkeypatch.setattr(LANGUAGE, "inline_asm_elementwise", _ptx)
    with devices.pretend(replace(devices.KNOWN["h200"], sms=3)):
        yield


def _check(case: Case, backend: str = "hopper") -> None:
    reports = verify(ATTENTION_FP8, case, torch.float32, backend, "cpu")
    assert not [report.message for report in reports if not report.ok]


def _served() -> list[Case]:
    return [case for case in ATTENTION_FP8.cases if case.axes["head_dim"] == case.axes["value_dim"] >= 64]


@pytest.mark.parametrize("case", _served(), ids=lambda case: case.name)
def test_the_matrix_in_the_emulator(case: Case, emulated: None) -> None:
    _check(case)


LONGER = {
    "plain": Case("plain", _axes(1, (130, 400), 2, 64)),
    "causal-64": Case("causal-64", _axes(2, 330, (2, 1), 64), {"mask": causal(), "return_lse": True}),
    "causal-128": Case("causal-128", _axes(1, 300, (4, 2), 128), {"mask": causal()}),
    "blocks-64": Case("blocks-64", _axes(1, 400, (2, 1), 64, blocks="qkv"), {"mask": causal()}),
    "blocks-128": Case("blocks-128", _axes(2, (200, 390), (2, 1), 128, blocks="qkv"), {"return_lse": True}),
    "gpt-oss": Case("gpt-oss", _axes(1, 300, (8, 1), 64), {"mask": causal() & window(128)}, present=("sinks",)),
    "streaming": Case("streaming", _axes(1, 450, 1, 64), {"mask": (window(100) | sink_tokens(4)) & causal()}),
    "late-queries": Case("late-queries", _axes(1, (300, 150), 2, 64), {"mask": causal(), "return_lse": True}),
    "documents": Case(
        "documents", _axes(2, 256, 2, 64), {"mask": causal() & documents((torch.arange(256) // 50).int().repeat(2, 1))}
    ),
    "a-head-sees-nothing": Case(
        "a-head-sees-nothing", _axes(1, 150, (4, 2), 64), {"mask": custom(lambda b, h, q, k: (h % 2 == 1) & (k <= q))}
    ),
    "softcap": Case("softcap", _axes(1, 300, 2, 128, blocks="k"), {"mask": causal(), "softcap": 2.0}),
    "negative-scale": Case("negative-scale", _axes(1, 260, 2, 64, blocks="qk"), {"scale": -0.1}),
    "half": Case("half", _axes(1, 260, 2, 64), {"out_dtype": torch.float16}),
}


@pytest.mark.parametrize("name", LONGER)
def test_several_tiles(name: str, emulated: None) -> None:
    _check(LONGER[name])


CONFIGS = [
    HopperFp8(2, 128, 2, 1, 240), HopperFp8(3, 64, 4, 2, 160), HopperFp8(2, 256, 2, 2, 240),
    HopperFp8(3, 128, 3, 1, 160),
    HopperFp8(2, 128, 2, 1, 240, 2), HopperFp8(3, 64, 2, 2, 160, 4), HopperFp8(3, 128, 4, 1, 160, 1),
    HopperFp8(2, 128, 2, 1, 240, 0, True), HopperFp8(3, 64, 6, 2, 160, 1, True), HopperFp8(2, 64, 2, 1, 240, 8, True),
]  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_kind_of_config(config: HopperFp8, emulated: None) -> None:
    blocks = "q" if config.block_n > 128 else "qkv"
    case = Case("config", _axes(1, (310, 590), (4, 2), 64, blocks=blocks), {"mask": causal() & window(150)})
    with tune.override(HOPPER, config):
        _check(case)


@pytest.mark.parametrize("by_polynomial", [1, 3, 8])
def test_exp2_by_polynomial(by_polynomial: int) -> None:
    """2^x to float32's accuracy in P and its sums, by the SFU or by FMAs; 0 for -inf."""
    x = torch.cat([torch.linspace(-130, 8, 8 * 4000), torch.full((8,), float("-inf"))])
    factor, shift = torch.tensor(0.37), torch.tensor(-3.0)
    numbers = [(x - shift) / factor, factor, shift, factor / 254, (shift + 127) / 254]
    text, operands = assembly.EXP2.value[by_polynomial], assembly.EXP2_CONSTRAINTS.value
    assert text.count("ex2") == 8 - by_polynomial
    found = _ptx(text, operands, numbers, torch.float32, True, 8)
    assert bool((found[-8:] == 0).all())
    exact = torch.exp2(x[:-8].double())
    error = (found[:-8].double() - exact).abs()
    assert float((error / exact)[x[:-8] > -100].max()) < 2e-5
    assert float(error.max()) < 2e-5 * 256
    assert bool((found[:-8] >= 0).all())


@pytest.mark.parametrize("seed", range(4))
def test_random_shapes(seed: int, emulated: None) -> None:
    chance = random.Random(seed)
    mask = chance.choice([None, causal(), causal() & window(90), window(50, 40)])
    lengths = (chance.randint(1, 300), chance.randint(8, 300))
    axes = _axes(2, lengths, (4, 2), chance.choice([64, 128]), blocks=chance.choice(["", "qkv", "v"]))
    _check(Case("random", axes, {} if mask is None else {"mask": mask}))


def _call(**changed: Any) -> dict[str, Any]:
    case = Case("call", _axes(2, (70, 150), (4, 2), 64, blocks="qkv"))
    return {**ATTENTION_FP8.make_inputs(case, torch.float32), "mask": causal(), "out_dtype": torch.float32, **changed}


GROWTHS = {"constant": 1.0, "rescaled": 6.0, "flagged": 400.0}


@pytest.mark.parametrize("mask", [None, causal(), causal() & window(200)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("blocks", ["", "qkv"])
@pytest.mark.parametrize("growth", GROWTHS)
def test_keys_that_outgrow_the_first_block(
    growth: str, blocks: str, mask: Any, emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P grows with the keys: rows that e4m3 cannot represent are rescaled, and those that float32 cannot are flagged
    and computed again with the online softmax."""
    flagged: list[Any] = []
    monkeypatch.setattr(hopper, "launch", gluon_emulator.counting_retries(flagged))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 400, heads, 128) for heads in (2, 1, 1))
    k[:, 128:] *= GROWTHS[growth]
    sizes = [128 if name in blocks else None for name in "qkv"]
    pairs = [fk.quantize_fp8(x, size, transpose=x is v) for x, size in zip((q, k, v), sizes)]
    given = [x for x, _ in pairs] + [scale for _, scale in pairs]
    options = {"return_lse": True, "out_dtype": torch.float32} | ({} if mask is None else {"mask": mask})
    found, lse = fk.attention_fp8(*given, **options, backend="hopper")
    exact, exact_lse = plain.attention_fp8(*given, **options)
    assert (
        float((found - exact).norm() / exact.norm()) < 0.04
    )  # weights are off by a sixteenth at most, 2.6% on average
    assert torch.allclose(lse, exact_lse, atol=2e-5, rtol=1e-5)
    assert len(flagged) == 1
    assert (flagged[0] > 0) == (growth == "flagged")


@pytest.mark.parametrize("backend", ["torch", "triton", "hopper"])
def test_the_lse_is_that_of_unrounded_probabilities(backend: str, emulated: None) -> None:
    """The tolerance of the matrix is FP8's; the sums of the softmax are float32's."""
    given = _call(return_lse=True, sinks=torch.randn(4))
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    exact = plain.attention_fp8(**wide)[1]
    found = fk.attention_fp8(**given, backend=backend)[1]
    assert torch.allclose(found.double(), exact, atol=2e-5, rtol=1e-5)


def test_torch_and_triton_do_not_round_probabilities_to_fp8() -> None:
    given = _call()
    exact = plain.attention_fp8(**given)
    assert torch.allclose(fk.attention_fp8(**given, backend="torch"), exact, atol=1e-5)
    assert torch.allclose(fk.attention_fp8(**given, backend="triton"), exact, atol=2e-3)


def _descriptors(**given: Any) -> tuple[Any, Any]:
    """(keys, values) as the Hopper kernel is given them."""
    with devices.pretend(devices.KNOWN["h200"]), collect_launches() as launches:
        fk.attention_fp8(**given, backend="hopper")
    found = [value for value in launches[0].args if hasattr(value, "block_shape")]
    return found[1], found[2]


@pytest.mark.parametrize("keys", [64, 150])
def test_what_quantize_gives_is_not_copied(keys: int) -> None:
    x = torch.randn(2, keys, 2, 64)
    (q, q_scale), (k, k_scale) = fk.quantize_fp8(x[:, :10]), fk.quantize_fp8(x)
    v, v_scale = fk.quantize_fp8(x, transpose=True)
    given = {"q": q, "k": k, "v": v, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    described = _descriptors(**given)
    assert described[1].base.data_ptr() == v.data_ptr()
    assert (described[0].base.data_ptr() == k.data_ptr()) == (keys % 4 == 0)  # the last quad is read whole
    lying = v.contiguous()
    assert _descriptors(**{**given, "v": lying})[1].base.data_ptr() != lying.data_ptr()


@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("transpose", [False, True])
def test_quantize(block: int | None, transpose: bool) -> None:
    x = torch.randn(2, 150, 3, 64) * torch.tensor([1e-3, 1.0, 300.0])[:, None]
    x[:, 128:] *= 5
    x[1, :, 2] = 0
    values, scale = fk.quantize_fp8(x, block, transpose=transpose)
    assert values.dtype == FP8
    assert values.shape == x.shape
    assert scale.shape == ((2, 3) if block is None else (2, 3, 2))
    assert (values.stride(1) == 1) == transpose
    back = plain.dequantized(values, scale, torch.float32)
    largest = x.abs().amax((1, 3), keepdim=True)
    assert bool(((back - x).abs() <= x.abs() / 16 + largest * 2.0**-17).all())
    assert bool((back[1, :, 2] == 0).all())
    first = x[:, : block or 150].abs().amax((1, 3))  # of the first block, or of the head
    found = scale if block is None else scale[..., 0]
    assert torch.allclose(found, torch.where(first > 0, first / 448, 1.0))


def test_rotation_keeps_products_and_spreads_outliers() -> None:
    turn = rotation(128, torch.device("cpu")).double()
    assert torch.allclose(turn @ turn.T, torch.eye(128, dtype=torch.float64), atol=1e-6)
    q, k = torch.randn(1, 40, 2, 128), torch.randn(1, 50, 2, 128)
    k[..., 7] += 50  # an outlier channel
    products = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double())
    rotated = torch.einsum("bqhd,bkhd->bhqk", q.double() @ turn, k.double() @ turn)
    assert torch.allclose(products, rotated, atol=1e-5 * float(products.abs().max()))
    constant = torch.ones(1, 1, 1, 128)
    for x in (k, constant):  # neither one channel nor what all have in common stays in one
        assert float((x.double() @ turn).abs().max()) < 0.5 * float(x.norm(dim=-1).max())


@pytest.mark.parametrize("both", [True, False])
def test_rotation_pays_where_q_and_k_have_their_outliers_in_the_same_channels(both: bool) -> None:
    """A float's error is relative: one large channel alone is as well off as many middling ones."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 200, 2, 128), torch.randn(1, 300, 2, 128)
    k[..., 7] *= 50
    if both:
        q[..., 7] *= 50
    exact = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double())

    def error(rotate: bool) -> float:
        wide = [plain.dequantized(*fk.quantize_fp8(x, rotate=rotate), torch.float64) for x in (q, k)]
        return float((torch.einsum("bqhd,bkhd->bhqk", *wide) - exact).norm())

    ratio = error(True) / error(False)
    assert ratio < 0.3 if both else 0.5 < ratio < 2


def test_the_rotated_call_answers_the_plain_question() -> None:
    q, k, v = (torch.randn(1, 60, 2, 64) for _ in range(3))
    quantized = [fk.quantize_fp8(q, rotate=True), fk.quantize_fp8(k, 128, rotate=True), fk.quantize_fp8(v)]
    out = fk.attention_fp8(*(x for x, _ in quantized), *(s for _, s in quantized), mask=causal())
    exact = fk.attention(q, k, v, mask=causal())
    assert float((out - exact).norm() / exact.norm()) < 0.06


def test_the_accuracy_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parent.parent / "examples")
    found = importlib.import_module("fp8_accuracy").main(["--length", "256", "--heads", "1"])
    plainly, rotated = "fp8, a scale a head", "fp8, a scale a head, rotated"
    assert all(row["bf16"] < 0.005 for row in found.values())
    assert found["normal"][plainly] < 0.07
    assert found["outlier channels in q and k"][rotated] < 0.5 * found["outlier channels in q and k"][plainly]


@pytest.mark.parametrize(
    "changed, why",
    [
        ({"q": torch.zeros(2, 70, 4, 64)}, "must be float8_e4m3fn"),
        ({"k": torch.zeros(2, 150, 2, 32).to(FP8)}, "head_dim 64 and k has 32"),
        ({"v": torch.zeros(2, 149, 2, 64).to(FP8)}, "every key needs its value"),
        ({"q_scale": torch.ones(2, 4, 3)}, "q_scale is"),
        ({"k_scale": torch.ones(2, 2).double()}, "k_scale is"),
        ({"v_scale": torch.ones(4, 2)}, "v_scale is"),
        ({"sinks": torch.ones(3)}, "sinks are"),
        ({"sinks": torch.ones(4, requires_grad=True)}, "no gradient"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"out_dtype": torch.float64}, "out_dtype is"),
    ],
)
def test_refusals(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        fk.attention_fp8(**_call(**changed))


def test_refusals_of_quantize_and_of_masks_that_are_none() -> None:
    with pytest.raises(ValueError, match="block is 64"):
        fk.quantize_fp8(torch.zeros(1, 2, 3, 64), 64)
    with pytest.raises(ValueError, match="powers of two"):
        fk.quantize_fp8(torch.zeros(1, 2, 3, 96), rotate=True)
    with pytest.raises(ValueError, match="must be a float tensor"):
        fk.quantize_fp8(torch.zeros(2, 3, 64))
    with pytest.raises(TypeError, match="may be a boolean tensor"):
        fk.attention_fp8(**_call(mask=torch.ones(70, 150)))


def test_hopper_declines_other_widths(emulated: None) -> None:
    case = Case("narrow", _axes(1, 16, 2, 32))
    answer = explain(fk.attention_fp8, **ATTENTION_FP8.make_inputs(case, torch.float32))
    assert "64 or 128 wide" in next(verdict.reason for verdict in answer.verdicts if verdict.backend == "hopper")


@pytest.mark.compile
@pytest.mark.parametrize(
    "name",
    [
        "d64-n16384",
        pytest.param("d128-n16384", marks=pytest.mark.every_config),
        "d128-n16384-causal",
        pytest.param("blocks-d128-n16384", marks=pytest.mark.every_config),
    ],
)
def test_machine_code(name: str) -> None:
    """Properties of the main loops: threads exchange only row maxima and sums; an element of P costs half a conversion
    and a quarter of a byte permutation; exponentials run beside O += P V; O is rescaled behind a branch only. The lazy
    loop compares sums of P and no scores."""
    case = next(case for case in ATTENTION_FP8.benches if case.name == name)
    inputs = shapes_only(ATTENTION_FP8, case, torch.bfloat16)
    with devices.pretend(devices.KNOWN["h200"]), collect_launches() as launches:
        fk.attention_fp8(**inputs, **case.options, backend="hopper")
    machine = compiled(launches[0], 90)
    traits = launches[0].constants["TRAITS"]
    assert traits.LAZY_RESCALE
    consumers, tile = traits.NUM_CONSUMERS, traits.BLOCK_N // 2  # a thread's elements of S
    sass = machine.sass
    assert "HGMMA" not in sass
    packed = len(re.findall(r"F2FP\.SATFINITE\.E4M3", sass))
    assert packed == 4 * consumers * tile // 2  # in the loop and behind it, lazy and online
    assert sass.count("PRMT") <= packed // 2
    assert sass.count("SHFL") <= 2 + consumers * (3 + 3) * 4  # two maxima and one sum, of two rows, among four threads
    loops = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1", sass)[1:]  # from where the scores are there
    assert len(loops) == 2 * consumers
    by_sfu = tile * (8 - traits.POLYNOMIAL_EXP2) // 8
    # In the online loop, which few work tiles need, ptxas moves one of them behind the wait, that of triton 3.9 half.
    moved = 1 if triton_version() == (3, 6) else by_sfu // 2
    lazy = 0  # loops without row maxima
    for loop in loops:
        before, after = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0", loop, maxsplit=1)
        online = before.count("FMNMX") >= 8
        lazy += not online
        assert before.count("MUFU.EX2") >= by_sfu - online * moved
        assert before.count("BAR.SYNC") <= 1  # what the compiler adds; releases arrive at named barriers
        step = re.split(r"@!?P\d+ BRA", after)
        assert "VOTE.ANY" in before + step[0]
        assert step[0].count("FMUL") < 8
        assert step[1].count("FMUL") >= traits.HEAD_DIM // 2
    assert lazy == consumers


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_causal_and_window_are_a_mask(backend: str) -> None:
    x = torch.randn(1, 24, 2, 64)
    (q, q_scale), (v, v_scale) = fk.quantize_fp8(x), fk.quantize_fp8(x, transpose=True)
    given = (q, q, v, q_scale, q_scale, v_scale)
    for options, mask in (
        ({"causal": True}, fk.causal()),
        ({"causal": True, "window": 5}, fk.causal() & fk.window(5)),
        ({"causal": True, "mask": fk.sink_tokens(2)}, fk.causal() & fk.sink_tokens(2)),
    ):
        found = fk.attention_fp8(*given, **options, backend=backend)
        assert torch.equal(found, fk.attention_fp8(*given, mask=mask, backend=backend))
    with pytest.raises(ValueError, match="window"):
        fk.attention_fp8(*given, window=0)
