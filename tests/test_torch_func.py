"""torch.func, tensors without values and views with the sign reversed: what operators do with tensors that are no plain
ones is right or refused, never silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flashkernel as fk
from flashkernel.core.check import named
from flashkernel.core.op import Op
from flashkernel.ops import registry

X, WEIGHT = torch.randn(2, 4, 32), torch.rand(32)
Q, K, V = torch.randn(3, 2, 20, 2, 16)
IDS = torch.arange(20) // 7


def _norm(x: Tensor) -> Tensor:
    return fk.rms_norm(x, WEIGHT, backend="triton")


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = fk.causal() & fk.documents(IDS)  # whose ids are a list of tensors to the operator
    return fk.attention(q, k, v, mask=mask, backend="triton")


def _reversed(x: Tensor) -> Tensor:
    """A tensor of x's values whose memory holds those of the other sign."""
    found = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert found.is_neg()
    assert torch.equal(found, x)
    return found


def _floats(op: Op) -> tuple[dict[str, Tensor], list[str]]:
    case = op.cases[0]
    given = {name: x.detach() for name, x in op.make_inputs(case, case.dtypes[0]).items()}
    return given, [name for name, x in given.items() if x.is_floating_point() and x.dtype.itemsize > 1]


def _kernels() -> list[Any]:
    return [pytest.param(op, backend.name, id=f"{op.name}-{backend.name}")
            for op in registry().values() for backend in op.backends if backend.name in ("triton", "cpp")]  # fmt: skip


def _call(op: Op, backend: str) -> tuple[Callable[..., Any], dict[str, Tensor], list[str]]:
    """The operator with the options of its first case, its inputs, and the names of those that are floats."""
    given, names = _floats(op)
    call = partial(op.call, **op.cases[0].options, backend=backend)
    try:
        fk.explain(call, **given)
    except fk.BackendError as error:
        pytest.skip(str(error).partition("\n")[0])
    if fk.explain(call, **given).chosen is None:
        pytest.skip("the backend cannot serve the first case")
    return call, given, names


@pytest.mark.parametrize(("op", "backend"), _kernels())
def test_forward_mode_is_refused(op: Op, backend: str) -> None:
    """Through torch.autograd.forward_ad and torch.func.jvp. The derivative was none, or zeros."""
    call, given, names = _call(op, backend)
    outputs = named(call(**{name: x.clone() for name, x in given.items()})).values()
    if not names or op.name == "moe_sort" or (outputs and not any(x.is_floating_point() for x in outputs)):
        pytest.skip("integers have no derivative, and torch alone returns the weights of moe_sort")
    x = given.pop(names[0])
    refused = pytest.raises((NotImplementedError, ValueError), match=r"no forward-mode derivatives|no gradient")
    with refused, forward_ad.dual_level():
        call(**{names[0]: forward_ad.make_dual(x, torch.ones_like(x))}, **given)
    with refused:
        torch.func.jvp(lambda x: call(**{names[0]: x}, **given), (x,), (torch.ones_like(x),))


@pytest.mark.parametrize(
    "derivative",
    [
        torch.func.jacfwd(_norm),
        torch.func.hessian(lambda x: _norm(x).sum()),
        torch.func.grad(lambda x: torch.func.jvp(_norm, (x,), (x,))[1].sum()),
        torch.vmap(lambda x: torch.func.jvp(_norm, (x,), (x,))[1]),
        torch.compile(lambda x: torch.func.jvp(_norm, (x,), (x,))[1], backend="eager"),
    ],
    ids=["jacfwd", "hessian", "grad of jvp", "vmap of jvp", "compiled"],
)
def test_forward_mode_within_other_transforms(derivative: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(NotImplementedError, match="flashkernel::norm: kernels have no forward-mode derivatives"):
        derivative(X[0, :1])


def test_forward_mode_of_a_gradient() -> None:
    x = X.clone().requires_grad_()
    out = _norm(x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        out.backward(forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


def test_tensors_without_a_tangent_are_taken_in_forward_mode() -> None:
    expected = _norm(X)
    with forward_ad.dual_level():
        assert torch.equal(_norm(X), expected)
    tangent = torch.func.jvp(lambda x: x.sin() + _norm(X), (X,), (torch.ones_like(X),))[1]
    torch.testing.assert_close(tangent, X.cos())


def test_reverse_mode() -> None:
    """grad, vjp, jacrev and vmap of them, against autograd."""
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    out = _attention(*leaves)
    expected = torch.autograd.grad(out.sin().sum(), leaves)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(q, k, v).sin().sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(Q, K, V)
    value, pull_back = torch.func.vjp(_attention, Q, K, V)  # which runs after the transform has ended
    for one, other, pulled in zip(found, expected, pull_back(value.cos())):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(pulled, other)
    rows = torch.autograd.functional.jacobian(_norm, X[0, :1])
    torch.testing.assert_close(torch.func.jacrev(_norm)(X[0, :1]), rows)


_OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 4.0},
    "slopes": {"alibi_slopes": torch.rand(2)},
    "sinks": {"sinks": torch.randn(2)},
    "score": {"score": lambda s, b, h, i, j: s * 0.5 + h},
    "documents": {"softcap": 4.0, "mask": fk.documents(IDS)},
    "dropout": {"dropout": 0.25, "seed": 3},
}


@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS.keys())
def test_attention_by_torch_operators(options: dict[str, Any]) -> None:
    """Forward mode, reverse mode and vmap of calls whose tiles are an autograd.Function of their own in eager mode."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fk.attention(q, k, v, causal=True, backend="torch", **options)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v).sin().sum()

    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for one, other in zip(torch.func.grad(loss, argnums=(0, 1, 2))(Q, K, V), expected):
        torch.testing.assert_close(one, other)
    direction = torch.randn_like(Q)
    (tangent,) = torch.func.jvp(lambda q: loss(q, K, V), (Q,), (direction,))[1:]
    torch.testing.assert_close(tangent, (expected[0] * direction).sum())
    many = torch.stack([Q, 2 * Q])
    found = torch.vmap(attend, in_dims=(0, None, None))(many, K, V)
    torch.testing.assert_close(found, torch.stack([attend(one, K, V) for one in many]))


_WITHOUT_VALUES = (
    "attention", "attention_varlen", "rotary_attention", "attention_fp8", "decode_attention", "paged_attention",
    "append_kv", "rope",
)  # fmt: skip


@pytest.mark.parametrize("name", _WITHOUT_VALUES)
@pytest.mark.parametrize("backend", [None, "torch"])
def test_tensors_without_values(name: str, backend: str | None) -> None:
    """On the meta device, and FakeTensors: results have the shapes and dtypes of those with values."""
    op = registry()[name]
    for case in op.cases[::3]:
        given = op.make_inputs(case, case.dtypes[0])
        call = partial(op.call, **case.options, backend=backend)
        expected = named(call(**{name: x.clone() for name, x in given.items()}))
        meta = call(**{name: x.to("meta") for name, x in given.items()})
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = call(**{name: mode.from_tensor(x) for name, x in given.items()})
        for found in (named(meta), named(fake)):
            assert {name: (x.shape, x.dtype) for name, x in found.items()} == {
                name: (x.shape, x.dtype) for name, x in expected.items()
            }, case.name


def test_a_quantized_weight_without_values() -> None:
    """Its product is a kernel's on a CPU, which has no memory to read."""
    weight = fk.Weight.quantize(torch.empty(64, 64, device="meta"), "int4")
    assert fk.linear(torch.empty(3, 64, device="meta"), weight).shape == (3, 64)


@pytest.mark.parametrize("times", [1, 5])
def test_second_derivatives_are_refused(times: int, recorded_soon: None) -> None:
    """Also where the sum has another way to the inputs, and the gradient of a gradient would be left out of it."""
    for _ in range(times):
        leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
        out = _attention(*leaves)
        gradients = torch.autograd.grad(out.sum(), leaves, create_graph=True)
        for one, other in zip(gradients, torch.autograd.grad(_attention(*leaves).sum(), leaves)):
            torch.testing.assert_close(one, other)
        penalty = out.sum() + sum(one.square().sum() for one in gradients)
        refused = pytest.raises(RuntimeError, match="flashkernel::attention: there are no second derivatives")
        for leaf in leaves:
            with refused:
                torch.autograd.grad(penalty, leaf, allow_unused=True, retain_graph=True)
        with refused:
            penalty.backward()
    q = Q.clone().requires_grad_()
    out = fk.attention(q, K, V, causal=True, softcap=4.0, backend="torch")  # an autograd.Function of its own
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="flashkernel::attention: there are no second derivatives"):
        torch.autograd.grad(gradient.sum() + out.sum(), q)
    with pytest.raises(RuntimeError, match="flashkernel::norm: there are no second derivatives"):
        torch.func.grad(lambda x: torch.func.grad(lambda x: _norm(x).sum())(x).sum())(X)
    with pytest.raises(RuntimeError, match="there are no second derivatives"):
        torch.func.jacrev(torch.func.jacrev(_norm))(X[0, :1])
    mixed = torch.func.grad(lambda x: torch.func.grad(lambda y: _norm(y).sum())(X).sum() + x.sum())(X)
    assert torch.equal(mixed, torch.ones_like(X))


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_kept_graph_of_a_checkpoint(backend: str) -> None:
    """Saved tensors may be unpacked once; softcap makes attention an autograd.Function on every backend."""

    def function(q: Tensor) -> Tensor:
        return fk.attention(q, K, V, causal=True, softcap=4.0, backend=backend)

    q = Q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(q).sum(), q)
    out = checkpoint(function, q, use_reentrant=False)
    (found,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    torch.testing.assert_close(found, expected)


def test_vmap() -> None:
    """Over operators with one and with several outputs, with a list of tensors, and over their gradients."""
    torch.testing.assert_close(torch.vmap(_norm)(X), _norm(X))
    torch.testing.assert_close(torch.vmap(_norm, in_dims=1, out_dims=1)(X), _norm(X))
    many = torch.stack([Q, 2 * Q])
    expected = torch.stack([_attention(one, K, V) for one in many])
    torch.testing.assert_close(torch.vmap(_attention, in_dims=(0, None, None))(many, K, V), expected)
    both = torch.vmap(lambda x: fk.rms_norm(x, WEIGHT, residual=X[0], backend="triton"))(X)
    for one, other in zip(both, fk.rms_norm(X, WEIGHT, residual=X[:1].expand_as(X), backend="triton")):
        torch.testing.assert_close(one, other)
    per_sample = torch.vmap(torch.func.grad(lambda weight, x: fk.rms_norm(x, weight, backend="triton").sin().sum()),
                            in_dims=(None, 0))(WEIGHT, X)  # fmt: skip
    for one, x in zip(per_sample, X):
        weight = WEIGHT.clone().requires_grad_()
        fk.rms_norm(x, weight, backend="triton").sin().sum().backward()
        torch.testing.assert_close(one, weight.grad)


@pytest.mark.parametrize(("op", "backend"), _kernels())
def test_views_with_the_sign_reversed_are_refused(op: Op, backend: str) -> None:
    """Kernels read their memory, which holds the other sign."""
    call, given, names = _call(op, backend)
    for name in names:
        with pytest.raises(TypeError, match=r"\w is a view with its sign reversed .* its .resolve_neg\(\) is"):
            call(**{**given, name: _reversed(given[name])})


@pytest.mark.parametrize("times", [1, 5])
def test_gradients_and_tables_with_the_sign_reversed(times: int, recorded_soon: None) -> None:
    gradient = torch.randn(2, 20, 2, 16)
    slopes = torch.rand(2)

    def results(done: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        q, read = Q.clone().requires_grad_(), fk.Table(slopes)
        out = fk.attention(q, K, V, score=lambda s, b, h, i, j: s - read[h] * abs(i - j), backend="triton")
        return out, *torch.autograd.grad(out, q, done)

    x = X.clone().requires_grad_()
    (exact,) = torch.autograd.grad(_norm(x), x, X)
    for _ in range(times):
        for one, other in zip(results(gradient, slopes), results(_reversed(gradient), _reversed(slopes))):
            assert torch.equal(one, other)
        (found,) = torch.autograd.grad(_norm(x), x, _reversed(X))
        assert torch.equal(found, exact)
