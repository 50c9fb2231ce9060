"""Outputs in memory that a call reads: refused, unless each element is read and written by one program."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel.core.arguments import shares_memory

BACKENDS = ["torch", "triton", "reference"]
OVERLAP = "out lies in the memory of a tensor"


def _bytes(x: Tensor) -> set[int]:
    """All bytes of a view, one by one."""
    width = x.element_size()
    places = itertools.product(*[[index * step for index in range(size)] for size, step in zip(x.shape, x.stride())])
    starts = [(x.storage_offset() + sum(place)) * width for place in places]
    return {start + one for start in starts for one in range(width)}


def _view(rng: random.Random, buffer: Tensor) -> Tensor:
    """A random view: slices with steps, transposed, of another dtype, a row or all of it."""
    if rng.random() < 0.3:
        buffer = buffer.view(torch.int16)
    for dim in range(buffer.ndim):
        if rng.random() < 0.6:
            low = rng.randrange(buffer.shape[dim])
            buffer = buffer[
                (slice(None),) * dim + (slice(low, rng.randint(low, buffer.shape[dim]), rng.choice((1, 2))),)
            ]
    if rng.random() < 0.3:
        buffer = buffer.transpose(0, 1)
    return buffer.expand(2, *buffer.shape) if rng.random() < 0.1 else buffer


def test_shared_memory_is_never_missed() -> None:
    """Against all bytes of both views; views that are taken to share memory and do not are few."""
    rng, buffer, found = random.Random(0), torch.zeros(4, 6, 8), []
    for _ in range(1500):
        x, other = _view(rng, buffer), _view(rng, buffer)
        shared = bool(_bytes(x) & _bytes(other))
        assert shares_memory(x, other) or not shared, (x.shape, x.stride(), other.shape, other.stride())
        if not shared:
            found.append(shares_memory(x, other))
    assert len(found) > 200
    assert sum(found) < 0.25 * len(found)


def test_columns_of_one_buffer_share_no_memory() -> None:
    buffer = torch.zeros(3, 5, 64)
    q, k, v = buffer.split((32, 16, 16), -1)
    for one, other in itertools.permutations((q, k, v), 2):
        assert not shares_memory(one, other)
        assert not shares_memory(one.transpose(0, 1), other)
    assert not shares_memory(buffer[..., ::2], buffer[..., 1::2])
    assert not shares_memory(buffer[0], buffer[1])
    assert not shares_memory(buffer, torch.zeros(2))
    assert not shares_memory(buffer, buffer[:0])
    assert shares_memory(buffer[..., :33], k)
    assert shares_memory(buffer[..., ::2], buffer[..., 2:3])


def _overlapping() -> list[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """Calls whose output lies in an operand's memory; not the tensor itself, which another message names."""
    memory = torch.randn(4, 40)
    x, weight = memory[:3, :32], torch.randn(32, 32)
    square = torch.randn(33, 32)
    biased = torch.rand(4, 32) / 128
    quantized = replace(fk.Weight.quantize(torch.randn(32, 32), "int8"), scales=biased[0, :, None])
    batched = torch.randn(2, 3, 32)
    return [
        ("linear x", fk.linear, {"x": x, "weight": weight, "out": memory[1:, :32]}),
        ("linear other columns of x", fk.linear, {"x": x, "weight": weight[:8], "out": memory[:3, 31:39]}),
        ("linear weight", fk.linear, {"x": torch.randn(32, 32), "weight": square[:32], "out": square[1:]}),
        ("linear bias", fk.linear, {"x": torch.randn(4, 32), "weight": weight, "bias": biased[0], "out": biased}),
        ("linear scales", fk.linear, {"x": torch.randn(4, 32), "weight": quantized, "out": biased}),
        ("linear residual moved", fk.linear,
         {"x": torch.randn(3, 32), "weight": weight, "residual": x, "out": memory[1:, :32]}),
        ("matmul a", fk.matmul, {"a": x, "b": weight, "out": memory[1:, :32]}),
        ("matmul a transposed", fk.matmul, {"a": square[:32].t(), "b": weight, "out": square[:32]}),
        ("matmul b", fk.matmul, {"a": torch.randn(32, 32), "b": square[:32], "out": square[1:]}),
        ("matmul bias", fk.matmul, {"a": torch.randn(4, 32), "b": weight, "bias": biased[1], "out": biased}),
        ("matmul residual of a batch", fk.matmul,
         {"a": torch.randn(2, 3, 32), "b": weight, "residual": batched[0], "out": batched}),
        ("mlp weight", fk.mlp, {"x": torch.randn(16, 32), "gate_up_weight": torch.randn(64, 32),
                                "down_weight": square[:32], "out": square[17:]}),
    ]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", range(12))
def test_an_output_in_the_memory_of_an_operand_is_refused(index: int, backend: str) -> None:
    name, function, given = _overlapping()[index]
    before = given["out"].clone()
    with pytest.raises(ValueError, match=f"^{name.split()[0]}: {OVERLAP}"):
        function(**given, backend=backend)
    assert torch.equal(given["out"], before)
    given["out"] = given["out"].clone()
    wide = {key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in given.items()}
    wanted = function(**{key: x for key, x in wide.items() if key != "out"}, backend="reference")
    torch.testing.assert_close(function(**given, backend=backend).double(), wanted, atol=2e-4, rtol=1e-4)


def test_dz_in_the_memory_of_an_operand_is_refused() -> None:
    memory, b, z = torch.randn(5, 16), torch.randn(16, 16), torch.randn(4, 16)
    for backend in BACKENDS:
        with pytest.raises(ValueError, match="matmul_dact: dz_out lies in the memory"):
            fk.matmul_dact(memory[:4], b, z, activation="silu", dz_out=memory[1:], backend=backend)
        with pytest.raises(ValueError, match=r"matmul_dact: dz_out lies in the memory .* element for element"):
            fk.matmul_dact(z, b, memory[:4], activation="silu", dz_out=memory[1:], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [3, 70])
def test_an_output_may_be_the_residual_or_lie_beside_an_operand(backend: str, rows: int) -> None:
    buffer, weight = torch.randn(rows, 96), torch.randn(48, 48)
    x, out = buffer.split(48, -1)
    wanted = (x.double() @ weight.double().T + out.double()).float()
    assert fk.linear(x, weight, residual=out.view(1, rows, 48)[0], out=out, backend=backend) is out
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
    wanted = (x.double() @ weight.double() + out.double()).float()
    assert fk.matmul(x, weight, residual=out, out=out, backend=backend) is out
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)


def test_elements_that_lie_in_one_place_are_refused() -> None:
    windows = torch.zeros(20).unfold(0, 8, 1)[:4]
    with pytest.raises(ValueError, match=r"matmul: out is written to, and .* share memory"):
        fk.matmul(torch.randn(4, 8), torch.randn(8, 8), out=windows)


def test_a_main_grad_in_the_memory_of_the_weight_is_refused() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    with pytest.raises(ValueError, match="linear: a main_grad lies in the memory"):
        fk.linear(torch.randn(2, 8), weight, main_grads=[weight.detach()])


@pytest.mark.usefixtures("recorded_soon")
def test_a_repeated_call_is_refused_as_well(repeated: list[Any]) -> None:
    """A recording of calls whose output lies elsewhere does not serve one whose output lies in an operand."""
    b = torch.randn(16, 16)
    for _ in range(4):
        fk.matmul(torch.randn(4, 16), b, activation="silu", out=torch.empty(4, 16), backend="triton")
    assert repeated
    memory = torch.randn(5, 16)
    for out in (memory[1:], memory[:4]):
        with pytest.raises(ValueError, match=OVERLAP):
            fk.matmul(memory[:4], b, activation="silu", out=out, backend="triton")
