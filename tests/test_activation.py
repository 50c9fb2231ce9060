"""What the matrix cannot say about the activations: independent formulas, special values, layouts, errors."""

from __future__ import annotations

import math

import pytest
import torch
from compiled import compiled
from hypothesis import given, settings
from hypothesis import strategies as st
from in_turn import on_machines

from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.core import device as devices
from flashkernel.core.launch import collect_launches
from flashkernel.ops import activation
from flashkernel.ops.activation import library, spec
from flashkernel.ops.activation.configs import FEW

GATED = ("swiglu", "geglu", "reglu", "gpt_oss_glu")
ELEMENTWISE = ("gelu", "silu", "relu", "squared_relu")
KERNELS = "flashkernel.ops.activation.triton"


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


SCALAR = {
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    "silu": lambda x: x * _sigmoid(x),
    "relu": lambda x: max(x, 0.0),
    "squared_relu": lambda x: max(x, 0.0) ** 2,
}
SCALAR_GATED = {
    "swiglu": lambda g, u: g * _sigmoid(g) * u,
    "geglu": lambda g, u: 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u,
    "reglu": lambda g, u: max(g, 0.0) * u,
    "gpt_oss_glu": lambda g, u: (max(-7.0, min(u, 7.0)) + 1) * min(g, 7.0) * _sigmoid(1.702 * min(g, 7.0)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
def test_elementwise_formula(name: str, backend: str) -> None:
    x = torch.linspace(-9, 9, 61)
    expected = torch.tensor([SCALAR[name](float(value)) for value in x])
    torch.testing.assert_close(getattr(activation, name)(x, backend=backend), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
def test_gated_formula(name: str, backend: str) -> None:
    gate, up = torch.linspace(-9, 9, 40), torch.linspace(10, -8, 40)
    expected = torch.tensor([SCALAR_GATED[name](float(g), float(u)) for g, u in zip(gate, up)])
    torch.testing.assert_close(getattr(activation, name)(gate, up, backend=backend), expected, rtol=3e-6, atol=3e-6)


def test_exact_gelu_keeps_relative_accuracy_in_its_tail() -> None:
    """The fitted normal tail is good to a few float32 roundings where the value still matters, and falls to zero."""
    x = -torch.linspace(0, 5, 301)
    exact = torch.tensor([SCALAR["gelu"](float(value)) for value in x], dtype=torch.float64)
    got = activation.gelu(x, backend="triton").double()
    assert float(((got - exact).abs() / exact.abs().clamp_min(1e-30))[1:].max()) < 3e-6
    far = torch.tensor([-6.5, -8.0, -12.0, -40.0, -1e4, -1e30])
    assert float(activation.gelu(far, backend="triton").abs().max()) < 1e-9
    torch.testing.assert_close(activation.gelu(-far, backend="triton"), -far)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_special_values(name: str) -> None:
    """NaN stays, large values neither overflow early nor turn into NaN, and zero has torch's gradient."""
    function = getattr(activation, name)
    x = torch.tensor([float("nan"), 0.0, -0.0, 100.0, -100.0, 3e4, -3e4])
    expected = function(x, backend="torch")
    torch.testing.assert_close(function(x, backend="triton"), expected, equal_nan=True, rtol=1e-6, atol=1e-6)
    slopes = []
    for backend in ("torch", "triton"):
        leaf = x[1:].clone().requires_grad_()
        function(leaf, backend=backend).sum().backward()
        slopes.append(leaf.grad)
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-5, atol=1e-5)


def test_clamps_stop_the_gradient_beyond_the_limit_only() -> None:
    gate = torch.tensor([6.9, 7.0, 7.1, -9.0]).requires_grad_()
    up = torch.tensor([7.0, -7.0, 7.1, -7.1]).requires_grad_()
    activation.gpt_oss_glu(gate, up, backend="triton").sum().backward()
    assert [bool(value) for value in gate.grad != 0] == [True, True, False, True]
    assert [bool(value) for value in up.grad != 0] == [True, True, False, False]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_scalar_tensor(name: str) -> None:
    x = torch.tensor(1.5, requires_grad=True)
    y = getattr(activation, name)(x, backend="triton")
    y.backward()
    assert y.shape == ()
    assert x.grad.shape == ()
    assert y.item() == pytest.approx(SCALAR[name](1.5), rel=1e-6)


@pytest.mark.parametrize("packed", ["halves", "interleaved"])
@pytest.mark.parametrize("name", GATED)
def test_packed_equals_separate(name: str, packed: str) -> None:
    """A packed tensor gives what its two parts give, and its gradient is theirs, packed."""
    function = getattr(activation, name)
    both = torch.randn(2, 3, 22, requires_grad=True)
    gate, up = (part.detach().contiguous().requires_grad_() for part in split_gate_up(both, packed))
    cotangent = torch.randn(2, 3, 11)
    together = function(both, packed=packed, backend="triton")
    apart = function(gate, up, backend="triton")
    assert torch.equal(together, apart)
    together.backward(cotangent)
    apart.backward(cotangent)
    dgate, dup = split_gate_up(both.grad, packed)
    assert torch.equal(dgate, gate.grad)
    assert torch.equal(dup, up.grad)


def test_parts_of_an_interleaved_tensor_passed_as_views() -> None:
    """gate = x[..., ::2], up = x[..., 1::2]: columns two apart, gradients into the tensor they are views of."""
    x = torch.randn(3, 4, 10, requires_grad=True)
    y = activation.swiglu(x[..., ::2], x[..., 1::2], backend="triton")
    (gradient,) = torch.autograd.grad(y.sum(), x)
    expected = activation.swiglu(x, packed="interleaved", backend="torch")
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), x)[0])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_strides(data: st.DataObject) -> None:
    """Slices, steps and permutations of a larger tensor, each input with its own."""
    rank = data.draw(st.integers(1, 4))
    shape = tuple(data.draw(st.integers(0, 5)) for _ in range(rank))

    def view() -> torch.Tensor:
        order = data.draw(st.permutations(range(rank)))
        steps = [data.draw(st.integers(1, 3)) for _ in range(rank)]
        storage = torch.randn([shape[axis] * steps[axis] + 1 for axis in order])
        back = [order.index(axis) for axis in range(rank)]
        strided = storage.permute(back)
        slices = tuple(slice(1, 1 + size * step, step) for size, step in zip(shape, steps))
        return strided[slices] if 0 not in shape else torch.randn(shape)

    gate, up = view(), view()
    assert gate.shape == shape
    torch.testing.assert_close(
        activation.swiglu(gate, up, backend="triton"), activation.swiglu(gate, up, backend="reference")
    )


def test_gradient_of_one_input_only() -> None:
    gate, up = torch.randn(4, 6), torch.randn(4, 6, requires_grad=True)
    activation.geglu(gate, up, backend="triton").sum().backward()
    assert gate.grad is None
    torch.testing.assert_close(up.grad, activation.gelu(gate, approximate="tanh", backend="torch"))


@pytest.mark.parametrize("op", spec.OPS, ids=lambda op: op.name)
def test_reference_gradcheck(op) -> None:
    names = ("gate", "up") if "gate" in op.inputs else ("x",)
    # Away from the kinks at 0 and at the clamps' limits.
    values = torch.tensor([-8.5, -3.0, -0.4, 0.3, 2.0, 8.0], dtype=torch.float64)
    leaves = [values.roll(shift).view(2, 3).requires_grad_() for shift in range(len(names))]
    assert torch.autograd.gradcheck(op.plain, leaves)


@pytest.mark.parametrize("layout", ["plain", "separate", "halves", "interleaved"])
def test_opcheck(layout: str) -> None:
    gate = torch.randn(3, 8, requires_grad=True)
    up = torch.randn(3, 8, requires_grad=True) if layout == "separate" else None
    settings = ("silu" if layout == "plain" else "gpt_oss", layout, 1.7, 7.0, KERNELS)
    torch.library.opcheck(library.activation.registered, (gate, up, *settings))
    dy = torch.randn(3, 8 if layout in ("plain", "separate") else 4)
    arguments = (dy, gate.detach(), None if up is None else up.detach(), *settings)
    torch.library.opcheck(library.activation_backward.registered, arguments)


def test_compiles_without_graph_breaks() -> None:
    compiled = torch.compile(
        lambda x: activation.swiglu(x, backend="triton") * activation.gelu(x[..., :4], backend="triton"),
        fullgraph=True,
        backend="aot_eager",
    )
    x = torch.randn(3, 8, requires_grad=True)
    y = compiled(x)
    expected = activation.swiglu(x, backend="torch") * activation.gelu(x[..., :4], backend="torch")
    torch.testing.assert_close(y, expected)
    gradients = [torch.autograd.grad(value.sum(), x)[0] for value in (y, expected)]
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: activation.relu(torch.arange(3)), "relu: torch.int64 cannot be activated"),
        (lambda: activation.gelu(torch.ones(3), approximate="erf"), "'erf'; it must be 'none' or 'tanh'"),
        (lambda: activation.geglu(torch.ones(4), approximate="x"), "geglu: approximate is 'x'"),
        (lambda: activation.swiglu(torch.ones(2, 3)), r"swiglu: without up, gate holds both .* \(2, 3\)"),
        (lambda: activation.swiglu(torch.tensor(1.0)), "swiglu: without up"),
        (lambda: activation.swiglu(torch.ones(2, 4), torch.ones(2, 3)), r"float32 \(2, 3\) .* must match gate"),
        (lambda: activation.reglu(torch.ones(4), torch.ones(4).half()), "reglu: up is torch.float16"),
        (lambda: activation.swiglu(torch.ones(4), torch.ones(4, device="meta")), "on meta; it must match gate"),
        (lambda: activation.reglu(torch.ones(4), packed="odd"), "'odd'; it must be 'halves' or"),
        (lambda: activation.gpt_oss_glu(torch.ones(4), limit=-1.0), "limit is -1.0"),
    ],
)  # fmt: skip
def test_wrong_input(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.alone
def test_more_than_2_31_elements() -> None:
    """Offsets beyond int32, in one long row and in rows."""
    rows, width = 33, 2**26
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = 2.0
    assert float(activation.squared_relu(x, backend="triton")[-1, -1]) == 4.0
    y = activation.reglu(x, backend="triton")  # gate: the first half, zero
    x[-1, width // 2 - 1] = 3.0
    assert float(y.float().abs().max()) == 0.0
    assert float(activation.reglu(x, backend="triton")[-1, -1]) == 6.0


def _launches(op, case, dtype: torch.dtype, gpu: str):
    from flashkernel.ops.activation import triton as kernels

    kinds = {"swiglu": "silu", "geglu": "gelu_tanh", "reglu": "relu", "gpt_oss_glu": "gpt_oss"}
    kind = {"none": "gelu", "tanh": "gelu_tanh"}.get(case.options.get("approximate"), kinds.get(op.name, op.name))
    gate = torch.empty((case.axes["rows"], case.axes["columns"]), dtype=dtype, device="meta")
    up = gate if "up" in case.present else None
    layout = "separate" if up is not None else case.options.get("packed", "plain")
    with devices.pretend(devices.KNOWN[gpu]), collect_launches() as launches:
        y = kernels.forward(gate, up, kind, layout, 1.7, 7.0)
        if case.gradients:
            kernels.backward(y, gate, up, kind, layout, 1.7, 7.0)
    return launches


@pytest.mark.compile
@pytest.mark.parametrize("op, gpu, dtype", on_machines(spec.OPS))
def test_machine_code(op, gpu: str, dtype: torch.dtype) -> None:
    """Every bench case: nothing spilled, device memory through 16-byte accesses, or 8 where a launch is short."""
    arch = devices.KNOWN[gpu].arch
    seen = set()
    for case in op.benches:
        for launch in _launches(op, case, dtype, gpu):
            key = (launch.name, tuple(sorted(launch.constants.items())))
            if key in seen:
                continue
            seen.add(key)
            machine = compiled(launch, arch)
            accesses = {word for word in machine.sass.split() if word.startswith(("LDG.", "STG."))}
            assert machine.stack == 0, f"{case.name}: {launch.name} spills {machine.stack} bytes"
            few = case.axes["rows"] * case.axes["columns"] <= 2 * FEW
            enough = {"128", "64"} if few else {"128"}
            narrow = {access for access in accesses if not enough & set(access.split("."))}
            assert accesses, f"{case.name}: {launch.name} touches no memory"
            assert not narrow, f"{case.name}: {launch.name} has {narrow}"
