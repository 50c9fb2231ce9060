"""Arguments at the edge: numbers that make no sense, integer dtypes, autocast, and names that are not there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flashkernel as fk
from flashkernel.blocks.epilogue import Gate
from flashkernel.compat.flash_attn import flash_attn_func
from flashkernel.core.check import execute, named, wanted_gradients
from flashkernel.core.op import Op
from flashkernel.ops import registry

NAN, INF = math.nan, math.inf
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


def _heads(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 16, 4, 16), (1, 16, 2, 16), (1, 16, 2, 16))
    return tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)  # type: ignore[return-value]


Q, K, V = _heads()
X, ROW, TARGET = torch.randn(4, 32), torch.ones(32), torch.arange(4)
MATRIX = torch.randn(8, 32)
LENGTH = torch.tensor([16], dtype=torch.int32)
PAGED = (torch.tensor([0, 16], dtype=torch.int32), LENGTH, torch.zeros(1, 1, dtype=torch.int32))
FP8 = [part for x in (Q, K, V) for part in fk.quantize_fp8(x)]
FP8_ARGUMENTS = (*FP8[::2], *FP8[1::2])

# function, its other arguments, and for each setting the values that it must refuse
REFUSED: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, tuple[Any, ...]]]] = [
    (fk.attention, (Q, K, V), {"scale": (NAN, INF, -INF), "softcap": (NAN, INF, -1.0), "dropout": (NAN, -0.1, 1.0)}),
    (flash_attn_func, (Q, K, V), {"softmax_scale": (NAN,), "softcap": (NAN, INF), "dropout_p": (NAN, 1.5)}),
    (fk.attention_fp8, FP8_ARGUMENTS, {"scale": (NAN, INF), "softcap": (NAN, INF, -1.0)}),
    (fk.decode_attention, (Q[:, :1], K, V, LENGTH), {"scale": (NAN, INF), "softcap": (NAN, INF, -1.0)}),
    (fk.paged_attention, (Q[0], K, V, *PAGED), {"scale": (NAN, INF), "softcap": (NAN, INF, -1.0)}),
    (fk.rms_norm, (X, ROW), {"eps": (-1.0, NAN, INF), "offset": (NAN, INF)}),
    (fk.layer_norm, (X, ROW), {"eps": (-1.0, NAN, INF)}),
    (fk.linear, (X, MATRIX), {"scale": (NAN, INF), "norm_eps": (-1.0, NAN), "norm_offset": (NAN, INF)}),
    (fk.linear, (X, MATRIX), {"activation": (Gate("gpt_oss", NAN), Gate("gpt_oss", 1.0, -1.0))}),
    (fk.softmax, (X,), {"scale": (NAN, INF)}),
    (fk.gpt_oss_glu, (X,), {"alpha": (NAN, INF), "limit": (NAN, -1.0)}),
    (fk.cross_entropy, (X, TARGET), {"label_smoothing": (NAN, 2.0), "z_loss": (NAN, -1.0), "softcap": (NAN, INF)}),
    (fk.linear_cross_entropy, (X, MATRIX, TARGET), {"label_smoothing": (NAN,), "z_loss": (INF,), "softcap": (NAN,)}),
    (fk.Frequencies.plain, (16,), {"theta": (NAN, INF, 0.0, -1.0)}),
    (fk.Frequencies.linear, (16, 1e4), {"factor": (NAN, INF, 0.0, -2.0)}),
    (fk.Frequencies, ((1.0,),), {"scaling": (NAN, INF)}),
]


@pytest.mark.parametrize(
    ("function", "given", "name", "value"),
    [
        pytest.param(function, given, name, value, id=f"{function.__name__}-{name}={value}")
        for function, given, settings in REFUSED
        for name, values in settings.items()
        for value in values
    ],
)
def test_settings_without_meaning_are_refused(
    function: Callable[..., Any], given: tuple[Any, ...], name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=r"is .*; (it must|the clamp)|need at least one finite"):
        function(*given, **{name: value})


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32]


@on_devices
@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_targets_of_any_integer_dtype(dtype: torch.dtype, backend: str, device: str) -> None:
    """The class 156 is -100, the ignored index, in a byte."""
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(0)).to(device)
    matrix = torch.randn(200, 200, generator=torch.Generator().manual_seed(1)).to(device)
    target = torch.tensor([3, 100, 0, 127, 9] if dtype == torch.int8 else [3, 156, 0, 199, 9], device=device)
    for function, given in ((fk.cross_entropy, (logits,)), (fk.linear_cross_entropy, (logits, matrix))):
        for reduction in ("mean", "none"):
            options = {"reduction": reduction, "backend": backend}
            expected = function(*given, target, **options)
            assert torch.equal(function(*given, target.to(dtype), **options), expected)


def test_use_backend_knows_operators_and_backends() -> None:
    with (
        pytest.raises(ValueError, match=r"no operator 'nosuchop'; there are .*rms_norm"),
        fk.use_backend(nosuchop="torch"),
    ):
        pass
    with pytest.raises(ValueError, match=r"no operator has a backend 'abacus'; there are .*triton"):  # noqa: SIM117
        with fk.use_backend("abacus"):
            pass
    with pytest.raises(ValueError, match="rms_norm has no backend 'hopper'; it has"), fk.use_backend(rms_norm="hopper"):
        pass


def _autocast(device: str) -> torch.autocast:
    return torch.autocast(device, dtype=torch.bfloat16)


@on_devices
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_under_autocast_casts_as_torch_does(compiled: bool, backend: str, device: str) -> None:
    """q and k in float32, as from a rotary embedding, beside v in bfloat16; gradients in each input's dtype."""
    q, k, v = (x.requires_grad_() for x in _heads(device))
    narrow = v.detach().bfloat16().requires_grad_()
    bias = torch.randn(16, 16, device=device, requires_grad=True)
    function = lambda q, k, v, bias: fk.attention(q, k, v, bias, mask=fk.causal(), backend=backend)  # noqa: E731
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    with _autocast(device):
        out = function(q, k, narrow, bias)
        theirs = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, narrow)), enable_gqa=True,
            attn_mask=bias.masked_fill(torch.ones(16, 16, device=device).triu(1).bool(), -INF),
        )  # fmt: skip
    assert out.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(out, theirs.transpose(1, 2), rtol=2e-2, atol=2e-2)
    gradients = torch.autograd.grad(out.float().sum(), (q, k, narrow, bias))
    assert [x.dtype for x in gradients] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    with pytest.raises(ValueError, match="q, k and v must agree"):
        fk.attention(q, k, narrow)


@on_devices
def test_autocast_leaves_float64_alone(device: str) -> None:
    q, k, v = _heads(device, torch.float64)
    x, weight = X.double().to(device), MATRIX.double().to(device)
    with _autocast(device):
        assert fk.attention(q, k, v).dtype == torch.float64
        assert fk.linear(x, weight).dtype == F.linear(x, weight).dtype == torch.float64


@on_devices
@pytest.mark.parametrize("compiled", [False, True])
def test_linear_under_autocast(compiled: bool, device: str) -> None:
    x, weight, bias = (t.to(device).requires_grad_() for t in (torch.randn(4, 32), torch.randn(8, 32), torch.randn(8)))
    residual = torch.randn(4, 8, device=device, requires_grad=True)
    function = fk.linear
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(fk.linear, fullgraph=True, backend="aot_eager")
    with _autocast(device):
        out, theirs = function(x, weight, bias), F.linear(x, weight, bias)
        kept = function(x, weight, bias, residual)
    assert out.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(out, theirs, rtol=2e-2, atol=2e-2)
    assert kept.dtype == torch.float32, "a residual stream in float32 stays in float32"
    gradients = torch.autograd.grad((out.float() + kept).sum(), (x, weight, bias, residual))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)


@on_devices
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_pairs_of_dtypes_are_promoted_under_autocast(backend: str, device: str) -> None:
    """What torch promotes: x + residual, gate * up, keys beside values; outside autocast they are refused."""
    x, weight = X.to(device), ROW.to(device)
    narrow, (q, k, v) = x.bfloat16(), _heads(device)
    table = fk.Frequencies.plain(16)
    pages = [torch.zeros(1, 16, 2, 16, dtype=torch.bfloat16, device=device) for _ in range(2)]
    slots = torch.arange(16, device=device)
    calls: list[Callable[[], Any]] = [
        lambda: fk.rms_norm(narrow, weight, residual=x, backend=backend),
        lambda: fk.layer_norm(x, weight, residual=narrow, backend=backend),
        lambda: fk.swiglu(x, narrow, backend=backend),
        lambda: fk.rope(q, k.bfloat16(), frequencies=table, backend=backend),
    ]
    for call in calls:
        with _autocast(device):
            found = call()
        assert all(one.dtype == torch.float32 for one in (found if isinstance(found, tuple) else (found,)))
        with pytest.raises(ValueError, match="must match"):
            call()
    with torch.no_grad(), _autocast(device):
        fk.append_kv(k[0], v[0].bfloat16(), *pages, slots, backend=backend)
        length = torch.tensor([16], dtype=torch.int32, device=device)
        out = fk.decode_attention(q[:, :1], pages[0], pages[1], length, backend=backend)
    assert torch.equal(pages[0][0], k[0].bfloat16())
    assert out.dtype == torch.bfloat16, "q takes the cache's dtype"


LOWER = {
    "attention": ("q", "k", "v", "bias"),
    "attention_varlen": ("q", "k", "v"),
    "linear": ("x", "weight"),
    "linear_cross_entropy": ("x", "weight", "bias"),
    "mlp": ("x", "gate_up", "down"),
    "matmul": ("a", "b"),
    "matmul_dact": ("a", "b"),
    "grouped_matmul": ("x", "weights"),
    "grouped_weight_gradient": ("x", "dz"),
    "moe_experts": ("x", "gate_up", "down"),
    "quantized_linear": ("x",),
    "rotary_attention": ("q", "k", "v"),
}


def _under_autocast() -> list[Any]:
    ways = [("torch", False), ("torch", True), ("reference", False), ("triton", False)]
    return [pytest.param(op, *way, id="-".join([op.name, way[0], *["compiled"] * way[1]]))
            for op in registry().values() for way in ways
            if way[0] in {one.name for one in op.backends} and (way[0] != "triton" or op.name in LOWER)]  # fmt: skip


@on_devices
@pytest.mark.parametrize(("op", "backend", "compiled"), _under_autocast())
def test_autocast_does_what_a_cast_before_would(op: Op, device: str, backend: str, compiled: bool) -> None:
    """Operators of torch's lower-precision list take operands cast to its dtype; all others go on as without it."""
    case = op.cases[0]
    given = op.make_inputs(case, torch.float32, device)
    dtype = torch.float16 if backend == "triton" else torch.bfloat16  # which Triton's interpreter computes wrongly
    lower = {name: x.to(dtype) if name in LOWER.get(op.name, ()) else x for name, x in given.items()}
    options = {**case.options, "backend": backend}
    function = op.call
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(op.call, fullgraph=True, backend="aot_eager")
    function = op.observed(function)
    with torch.no_grad():
        expected = named(function(**lower, **options))
        with torch.autocast(device, dtype=dtype):
            found = named(function(**given, **options))
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def _pairs(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    assert found.keys() == expected.keys()
    return [(found[name], expected[name]) for name in expected]


@pytest.mark.parametrize(
    ("op", "backend"),
    [pytest.param(op, one.name, id=f"{op.name}-{one.name}") for op in registry().values() for one in op.backends
     if one.name in ("torch", "reference", "cpp", "triton")],
)  # fmt: skip
def test_torchs_default_device_is_not_asked(op: Op, backend: str) -> None:
    """Tensors on the CPU while torch.set_default_device names another device, gradients included."""
    served = 0
    for case in op.cases[: 1 if backend == "triton" else None]:
        dtype = torch.float32 if torch.float32 in case.dtypes else case.dtypes[0]
        inputs = op.make_inputs(case, dtype)
        options, wanted = {**case.options, "backend": backend}, wanted_gradients(op, case, inputs)
        given, again = ({name: x.clone() for name, x in inputs.items()} for _ in range(2))
        try:
            expected = execute(op.call, given, options, wanted)
        except fk.BackendError:
            continue
        with torch.device("meta"):
            found = execute(op.call, again, options, wanted)
        for one, other in [*_pairs(found.outputs, expected.outputs), *_pairs(found.gradients, expected.gradients)]:
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-3, atol=1e-5, equal_nan=True)
        served += 1
    if not served:
        pytest.skip("the backend serves no case here")


@pytest.mark.parametrize(("name", "backend"), [("attention", "torch"), ("attention", "triton"), ("linear", "triton")])
def test_backward_called_inside_autocast(name: str, backend: str) -> None:
    """Gradients are those of a backward called behind it, in the precision that forward had."""
    op = registry()[name]
    case = next(case for case in op.cases if case.gradients)
    given = op.make_inputs(case, torch.float32)
    leaves = {name: x.requires_grad_(x.is_floating_point()) for name, x in given.items()}
    wanted = [x for x in leaves.values() if x.requires_grad]
    options = {**case.options, "backend": backend, **({"softcap": 5.0} if name == "attention" else {})}
    loss = sum(out.float().square().sum() for out in named(op.call(**leaves, **options)).values())
    expected = torch.autograd.grad(loss, wanted, retain_graph=True)
    with _autocast("cpu"):
        found = torch.autograd.grad(loss, wanted)
    for one, other in zip(found, expected):
        assert torch.equal(one, other)
