"""Replay: in these tests a call is recorded the second time its key is seen, and replayed from the third on."""

from __future__ import annotations

import gc
import importlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_matrix import _declines
from torch import Tensor

import flashkernel as fk
from flashkernel.core import launch, replay, tune
from flashkernel.core.check import verify
from flashkernel.core.op import Case, Op, grid_of_cases
from flashkernel.core.replay import LaunchCache
from flashkernel.ops import registry
from flashkernel.ops.activation import library as activation
from flashkernel.ops.attention import library as attention
from flashkernel.ops.norm import library as norm
from flashkernel.ops.norm.configs import FORWARD

NEVER = {"paged_attention"}  # on a CPU it reads a workspace in another width
pytestmark = pytest.mark.usefixtures("recorded_soon")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _operators() -> Iterator[object]:
    for device in ("cpu", "cuda"):
        for op in registry().values():
            if any(backend.name == "triton" for backend in op.backends):
                cases = {case.name: case for case, dtype in grid_of_cases(op) if dtype == torch.float16}
                for case in list(cases.values())[:6]:
                    marks = [pytest.mark.gpu] if device == "cuda" else []
                    yield pytest.param(op, case, device, id=f"{op.name}-{case.name}-{device}", marks=marks)


@pytest.mark.parametrize("op, case, device", list(_operators()))
def test_every_operator_is_right_when_repeated(op: Op, case: Case, device: str, repeated: list[Any]) -> None:
    if reason := _declines(op, case, op.make_inputs(case, torch.float16, device), op.backend("triton")):
        pytest.skip(f"triton declines: {reason}")
    for seed in range(3):
        reports = verify(op, case, torch.float16, "triton", device, seed=seed)
        failures = [report.message for report in reports if not report.ok]
        assert not failures, f"call {seed + 1}: " + "\n".join(failures)
    assert repeated or op.name in NEVER


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses_with_leading_dims_are_repeated(
    reduction: str, chunk: int | None, repeated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward of both losses, and the public functions go straight to their operators."""
    if chunk is not None:
        monkeypatch.setattr("flashkernel.ops.loss.linear.chunk_rows", lambda rows, classes, size: chunk)

    def step(backend: str, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        x, weight = torch.randn(2, 5, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
        bias = torch.randn(16, requires_grad=True)
        target = torch.randint(0, 16, (2, 5))
        target[0, seed] = -100
        loss = fk.linear_cross_entropy(x, weight, target, bias, reduction=reduction, backend=backend)
        loss = loss + fk.cross_entropy(x @ weight.T, target, reduction=reduction, backend=backend)
        return [loss, *torch.autograd.grad(loss.square().sum(), (x, weight, bias))]

    for seed in range(4):
        del repeated[:]
        for found, wanted in zip(step("triton", seed), step("torch", seed)):
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    for function in (fk.linear_cross_entropy, fk.cross_entropy):
        entries = function.launch_cache.entries  # type: ignore[attr-defined]
        assert isinstance(entries[next(key for key in reversed(entries) if "triton" in key)], replay.OperatorCall)
    # linear_cross_entropy has its gradients in the forward pass, unless the reduction is "none".
    assert len(set(repeated)) == (3 if reduction == "mean" else 4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_training_step_is_repeated(device: str, repeated: list[Any]) -> None:
    """Norm, attention and activation, forward and backward: six recordings from the third step on."""

    def step(backend: str, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        x = torch.randn(2, 33, 64, device=device, requires_grad=True)
        weight = torch.randn(64, device=device, requires_grad=True)
        q, k, v = (fk.rms_norm(x, weight, backend=backend).view(2, 33, 4, 16) * (1 + n / 4) for n in range(3))
        o = fk.attention(q, k, v, mask=fk.causal(), backend=backend)
        y = fk.swiglu(o, q, backend=backend)
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, weight))]

    for seed in range(4):
        del repeated[:]
        for found, wanted in zip(step("triton", seed), step("torch", seed)):
            torch.testing.assert_close(found, wanted, atol=2e-2, rtol=1e-3)
    assert len(set(repeated)) == 6


def _rms(x: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
    with torch.no_grad():
        found = fk.rms_norm(x, weight, backend="triton", **options)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, fk.rms_norm(x, weight, backend="torch", **options))
    return found


def test_shapes_strides_settings_and_dtypes_are_told_apart(repeated: list[Any]) -> None:
    wide = torch.randn(40, 96)
    for x, eps in ((wide, 1e-6), (wide, 1e-2), (wide[:, :48], 1e-6), (wide[::2], 1e-6), (wide.half(), 1e-6)):
        for _ in range(3):
            _rms(x, eps=eps)
    assert len(repeated) == len(set(repeated)) == 5


def test_gradients_of_sinks_are_repeated(repeated: list[Any]) -> None:
    """They are added up by torch, in float32."""
    for _ in range(3):
        q, k, v = (torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3))
        sinks = torch.randn(2, requires_grad=True)
        found, wanted = (
            torch.autograd.grad(fk.attention(q, k, v, sinks=sinks, backend=backend).square().sum(), (q, k, v, sinks))
            for backend in ("triton", "torch")
        )
        for one, other in zip(found, wanted):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert len(repeated) == 2


def test_unaligned_arguments_have_recordings_of_their_own(repeated: list[Any]) -> None:
    memory = torch.randn(1 + 8 * 64)
    for _ in range(4):
        _rms(memory[1:].view(8, 64))
    assert len(set(repeated)) == 1
    for _ in range(4):
        _rms(memory[:-1].view(8, 64))
    assert len(repeated) == 4
    assert len(set(repeated)) == 2


def test_arguments_in_the_same_memory_are_told_apart_or_not_recorded(repeated: list[Any]) -> None:
    def check(q: Tensor, k: Tensor, v: Tensor) -> None:
        found = fk.attention(q, k, v, backend="triton")
        torch.testing.assert_close(found, fk.attention(q, k, v, backend="torch"))

    for _ in range(4):
        q, k, v = torch.randn(1, 20, 3, 2, 16).unbind(2)  # views of one tensor
        check(q, k, v)
    assert len(repeated) == 2
    for _ in range(3):
        check(q, k, k)  # the recording is there: k and v are found by place, not by memory
    assert len(repeated) == 5
    for _ in range(4):
        q, k = torch.randn(2, 1, 24, 2, 16).unbind(0)
        check(q, k, k)  # but they cannot be told apart while recording
    assert len(repeated) == 5


def test_an_argument_that_is_part_of_another_is_not_recorded(repeated: list[Any]) -> None:
    """What a call reads of the one looks like the other, which is elsewhere in the next call."""

    def normed(x: Tensor) -> Tensor:
        return norm.norm(x, None, None, None, 1e-6, 0.0, True, "flashkernel.ops.norm.triton")[0]

    torch.manual_seed(0)
    call = replay.replayed(lambda x, y: (normed(x[:, 32:]), normed(y)))
    for overlapping in (True, True, True, False, False):
        x = torch.randn(4, 64)
        y = x[:, 32:] if overlapping else torch.randn(4, 64)[:, 32:]
        for found, given in zip(call(x, y), (x[:, 32:], y)):
            torch.testing.assert_close(found, fk.rms_norm(given, backend="torch"), atol=1e-5, rtol=1e-4)
    assert [type(entry) for entry in call.launch_cache.entries.values()] == [int]  # it is tried again later


def test_one_tensor_in_several_places_is_not_recorded_with_gradients(repeated: list[Any]) -> None:
    """Other calls of these shapes have several tensors."""
    for _ in range(4):
        x = torch.randn(1, 20, 2, 16, requires_grad=True)
        fk.attention(x, x, x, backend="triton")
    for _ in range(3):
        q, k, v = (torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3))
        found, wanted = (fk.attention(q, k, v, backend=backend) for backend in ("triton", "torch"))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        for one, other in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (found, wanted))):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_overridden_and_searched_configs_are_used(repeated: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(12, 64)
    for _ in range(3):
        _rms(x)
    assert len(repeated) == 1
    asked: list[Any] = []
    pick = tune.pick
    monkeypatch.setattr(tune, "pick", lambda *args: asked.append(args) or pick(*args))
    config = FORWARD.heuristic(fk.core.device.properties(x.device), {"rows": 12, "width": 64, "bytes": 4, "sums": 1})
    with tune.override(FORWARD, config):
        _rms(x)
    assert len(asked) == 1
    assert len(repeated) == 1
    tune.clear_cache()
    _rms(x)
    assert len(asked) == 2
    assert len(repeated) == 1


def test_the_precision_of_products_is_what_it_is_now(repeated: list[Any]) -> None:
    q, k, v = (torch.randn(1, 21, 2, 16) for _ in range(3))
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            for _ in range(3):
                fk.attention(q, k, v, backend="triton")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert len(set(repeated)) == 2


def zeroed(x: Tensor) -> tuple[Tensor, Tensor]:
    """A copy into zeros, and a kernel on a view of what came of it: (the rms_norm of x, zeros)."""
    held = torch.zeros(2, *x.shape)
    held[1].copy_(x)
    inner = norm.norm.forward.function
    y = inner(held[1], None, None, None, 1e-6, 0.0, True, "flashkernel.ops.norm.triton")[0]
    return y.view(-1), held[0]


def test_what_torch_computes_is_repeated_or_not_recorded(repeated: list[Any]) -> None:
    inner = norm.norm.forward.function

    def scaled(x: Tensor) -> Tensor:
        return inner(x * x, None, None, None, 1e-6, 0.0, True, "flashkernel.ops.norm.triton")[0]

    kept, lost = LaunchCache(zeroed, "zeroed"), LaunchCache(scaled, "scaled")
    for _ in range(4):
        x = torch.randn(16, 16)
        y, zeros = kept((x,), {})
        wanted = fk.rms_norm(x, backend="torch")
        torch.testing.assert_close(y, wanted.view(-1))
        assert not zeros.any()
        assert zeros.shape == x.shape
        torch.testing.assert_close(lost((x,), {}), fk.rms_norm(x * x, backend="torch"))
    assert len(repeated) == 2


def test_a_backward_pass_of_torch_products_is_repeated(repeated: list[Any]) -> None:
    """The gradients of a linear layer without bias and activation: two products, and no launch of this library."""
    for seed in range(4):
        torch.manual_seed(seed)
        x, weight = torch.randn(5, 16, requires_grad=True), torch.randn(7, 16, requires_grad=True)
        dy = torch.randn(5, 7)
        found = torch.autograd.grad(fk.linear(x, weight, backend="triton"), (x, weight), dy)
        for gradient, wanted in zip(found, (dy @ weight, dy.t() @ x)):
            torch.testing.assert_close(gradient, wanted)
    source = next(recording.source for recording in repeated if "operation" in recording.source)
    assert source.count("empty(") == 6  # for the gradients that are not wanted; those of wanted ones are the products


def test_a_result_without_elements_is_repeated(repeated: list[Any]) -> None:
    """It has no address that says where in the memory of the others it begins."""
    for seed in range(4):
        torch.manual_seed(seed)
        x, weight = torch.randn(8, 80), torch.randn(16, 80)
        first, none = fk.linear(x, weight, splits=(16, 0), backend="triton")
        torch.testing.assert_close(first, x @ weight.t(), atol=1e-4, rtol=1e-4)
        assert none.shape == (8, 0)
    assert len(repeated) == 2


def test_memory_is_given_back_when_it_is_not_needed_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of kernels, each with an output of its own: two are alive at a time, as when not repeated."""
    inner = norm.norm.forward.function

    def chain(x: Tensor) -> Tensor:
        for _ in range(5):
            x = inner(x, None, None, None, 1e-6, 0.0, True, "flashkernel.ops.norm.triton")[0]
        return x

    known = LaunchCache(chain, "chain")
    x = torch.randn(4, 32)
    wanted = [known((x,), {}) for _ in range(2)][-1]
    torch.testing.assert_close(known((x,), {}), wanted)
    call = next(iter(known.entries.values()))
    alive: set[int] = set()
    most = 0
    for step, dead in call.steps:
        alive.update(step.slots())
        most = max(most, len([slot for slot in alive if slot > 0]))
        alive -= set(dead)
    assert most <= 2 * 4  # a call of norm has four outputs


@pytest.mark.parametrize("device", DEVICES)
def test_recordings_keep_no_tensors_of_the_call_alive(device: str, repeated: list[Any]) -> None:
    """Neither its arguments nor its results and what it saved for the backward pass."""
    kept: list[weakref.ref[Tensor]] = []

    def step() -> None:
        q, k, v, x = (torch.randn(1, 20, 2, 16, device=device, requires_grad=True) for _ in range(4))
        o = fk.attention(q, k, v, mask=fk.causal(), backend="triton")
        y = fk.swiglu(fk.rms_norm(o, backend="triton"), x, backend="triton")
        kept.extend(map(weakref.ref, (q, k, v, x, o, y, *torch.autograd.grad(y.square().sum(), (q, k, v, x)))))

    for _ in range(4):
        step()
    assert len(set(repeated)) == 6
    gc.collect()
    assert [number for number, reference in enumerate(kept) if reference() is not None] == []


@pytest.mark.gpu  # Triton's interpreter is for one thread
def test_threads_share_recordings() -> None:
    given = [torch.randn(8, 64, device="cuda") for _ in range(4)]
    wanted = [fk.swiglu(x, x + 1, backend="torch") for x in given]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(6):
            found = fk.swiglu(given[number], given[number] + 1, backend="triton")
            if not torch.allclose(found, wanted[number], atol=1e-5):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_recording_can_be_switched_off(repeated: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 48)
    monkeypatch.setenv("FLASHKERNEL_REPLAY", "0")
    for _ in range(4):
        _rms(x)
    assert not repeated
    monkeypatch.delenv("FLASHKERNEL_REPLAY")
    for _ in range(2):
        _rms(x)
    assert len(repeated) == 1


@pytest.mark.gpu
def test_a_graph_captures_a_repeated_call(repeated: list[Any]) -> None:
    """A recording belongs to its stream; captured there, it reads what its inputs hold when the graph is replayed."""
    x, stream = torch.randn(64, 256, device="cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fk.rms_norm(x, backend="triton")
    torch.cuda.synchronize()
    assert len(repeated) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = fk.rms_norm(x, backend="triton")
    assert len(repeated) == 2
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(y, fk.rms_norm(x, backend="torch"))


def test_old_recordings_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_KEYS", 3)
    forward = activation.activation.forward
    forward.entries.clear()
    for rows in range(1, 9):
        fk.silu(torch.randn(rows, 16), backend="triton")
        assert len(forward.entries) <= 3


def test_autograd_sees_a_repeated_call(repeated: list[Any]) -> None:
    """Outputs are new tensors with a graph of their own, and checkpointing and hooks work on them."""
    weight = torch.randn(32, requires_grad=True)
    for _ in range(4):
        x = torch.randn(4, 32, requires_grad=True)
        seen: list[Tensor] = []
        y = fk.rms_norm(x, weight, backend="triton")
        y.register_hook(seen.append)
        torch.utils.checkpoint.checkpoint(lambda y: y * 2, y, use_reentrant=False).sum().backward()
        assert len(seen) == 1
        assert x.grad is not None
        assert y.grad_fn is not None
    assert repeated
    assert attention.attention.function is not None


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_number_in_a_tensor_is_read_at_every_call(name: str, gradients: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, number: Tensor) -> Tensor:
        return fk.attention(q, k, v, backend="triton", **{name: float(number)})

    torch.manual_seed(0)
    call = replay.replayed(attend)
    for number in range(1, 6):
        q, k, v = (torch.randn(1, 20, 2, 16, requires_grad=gradients) for _ in range(3))
        found = call(q, k, v, torch.tensor(0.1 * number))
        wanted = fk.attention(q, k, v, backend="torch", **{name: 0.1 * number})
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_results_may_be_written_to_in_place(repeated: list[Any]) -> None:
    """As by a residual that is added to them: also those that are views of what the kernels wrote."""
    torch.manual_seed(0)
    weight, scale = torch.randn(16, 32, requires_grad=True), torch.ones(32, requires_grad=True)
    for _ in range(4):
        x, residual = torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 5, 16)
        found, wanted = (
            fk.linear(fk.rms_norm(x, scale, backend=backend).mul_(2), weight, backend=backend).add_(residual)
            for backend in ("triton", "torch")
        )
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        pair = (torch.autograd.grad(y.square().sum(), (x, weight)) for y in (found, wanted))
        torch.testing.assert_close(*pair, atol=1e-2, rtol=1e-3)
    assert repeated


@pytest.mark.parametrize("device", DEVICES)
def test_a_repeated_call_tells_autograd_what_it_wrote(device: str, repeated: list[Any]) -> None:
    frequencies = fk.Frequencies.plain(16)
    for _ in range(4):
        q = torch.randn(1, 8, 2, 16, device=device)
        wanted = fk.rope(q, frequencies=frequencies, backend="torch")
        before = q._version
        fk.rope(q, frequencies=frequencies, in_place=True, backend="triton")
        assert q._version > before
        torch.testing.assert_close(q, wanted)
    assert len(repeated) == 2


@pytest.mark.gpu
def test_hopper_linear_and_cuda_calls_are_repeated(repeated: list[Any]) -> None:
    """Tensor maps, tuples of pointers and CUDA C++ launches are packed as their kernels expect."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    half = {"device": "cuda", "dtype": torch.bfloat16}
    for seed in range(5):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(2, 300, heads, 64, **half).requires_grad_() for heads in (8, 2, 2))
        sinks = torch.randn(8, device="cuda", requires_grad=True)
        mask = fk.causal() & fk.window(128)
        o = fk.attention(q, k, v, sinks=sinks, mask=mask, backend="hopper")
        wanted = fk.attention(q, k, v, sinks=sinks, mask=mask, backend="torch")
        do = torch.randn_like(o)
        pairs = zip(
            (o, *torch.autograd.grad(o, (q, k, v, sinks), do)),
            (wanted, *torch.autograd.grad(wanted, (q, k, v, sinks), do)),
        )
        x, weights = torch.randn(3, 256, **half), [torch.randn(64, 256, **half) / 16 for _ in range(3)]
        with torch.no_grad():
            linear = zip(fk.linear(x, weights, backend="triton"), fk.linear(x, weights, backend="torch"))
            total = [(fk.sum(x, backend="cuda"), fk.sum(x, backend="torch"))]
        for found, expected in (*pairs, *linear, *total):
            torch.testing.assert_close(found, expected, atol=5e-2, rtol=5e-2)
    names = {step.record.name for recording in repeated for step, _ in recording.steps if hasattr(step, "record")}
    assert {"attention_forward", "attention_backward"} <= names
    assert any("linear" in name for name in names)
    assert any("row" in name or "sum" in name or "reduce" in name for name in names)


def test_a_call_that_cannot_be_recorded_says_why(repeated: list[Any]) -> None:
    x = torch.randn(1, 20, 2, 16)
    for _ in range(4):
        fk.attention(x, x, x, mask=fk.documents(torch.zeros(1, 20, dtype=torch.int32)), backend="triton")
        fk.gelu(torch.randn(4, 16), backend="torch")
    assert not repeated
    reasons = {name: found for name, _, found in replay.statistics() if found}
    assert any("asks torch for" in reason for reason in reasons["gelu"])


@pytest.mark.parametrize("gradients", [False, True])
def test_a_product_that_torch_serves_goes_to_torch(
    recorded_soon: None, gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the checks and the dispatch of its first calls; a call that does more than torch's function is made."""
    api = importlib.import_module("flashkernel.ops.gemm.api")
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 5, 8), torch.randn(4, 8), torch.randn(4)
    weight.requires_grad_(gradients)
    for residual in (None, torch.randn(3, 5, 4)):
        for dtype in (torch.float32, torch.float64):
            given = x.to(dtype), weight.to(dtype), bias.to(dtype)
            added = None if residual is None else residual.to(dtype)
            for _ in range(4):
                found = fk.linear(*given, residual=added, backend="torch")
                product = torch.nn.functional.linear(*given)
                torch.testing.assert_close(found, product if added is None else product + added)
                assert found.requires_grad == gradients
    monkeypatch.delattr(api, "choose")  # what is not found in the launch cache fails
    given = x + 1, weight.detach().requires_grad_(gradients), bias
    found = fk.linear(*given, residual=None, backend="torch")
    torch.testing.assert_close(found, torch.nn.functional.linear(*given))


def test_torch_serves_the_operands_of_each_call(recorded_soon: None) -> None:
    a, b = torch.randn(6, 8), torch.randn(8, 8)
    for _ in range(4):
        a, b = a + 1, b - 1
        torch.testing.assert_close(fk.matmul(a, b, backend="torch"), a @ b)
        torch.testing.assert_close(fk.matmul(a, b, scale=0.5, backend="torch"), 0.5 * (a @ b))
        torch.testing.assert_close(fk.matmul(b, b, backend="torch"), b @ b)
        with torch.autocast("cpu", torch.bfloat16):
            assert fk.matmul(a, b, backend="torch").dtype == torch.bfloat16
    with fk.use_backend("reference"):
        assert fk.matmul(a, b).dtype == torch.float32


def test_a_launch_that_is_not_understood_is_made_and_not_repeated(
    repeated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any) -> Any:
        raise AttributeError("no packed_metadata")

    monkeypatch.setattr(launch, "_launch_record", unknown)
    for _ in range(4):
        _rms(torch.randn(7, 32))
    assert not repeated
    assert any("is not understood" in reason for _, _, found in replay.statistics() for reason in found)
