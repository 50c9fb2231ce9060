"""Replay by the C++ extension (core/native): the same results as without it, and an autograd node of its own."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_matrix import _declines
from test_replay import NEVER, zeroed
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flashkernel as fk
from flashkernel.core import cpp, driver, launch, recording, recording_steps, replay, replay_switch, tune
from flashkernel.core.check import verify
from flashkernel.core.driver import LaunchRecord, TensorMap
from flashkernel.core.native import build, describe
from flashkernel.core.op import Case, Op, grid_of_cases
from flashkernel.ops import registry

pytestmark = pytest.mark.usefixtures("in_cpp")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SETTLED = 5  # calls after which everything is replayed in C++


def _operators() -> Iterator[object]:
    for device, most in (("cpu", 1), ("cuda", 6)):
        for op in registry().values():
            if any(backend.name == "triton" for backend in op.backends):
                cases = {case.name: case for case, dtype in grid_of_cases(op) if dtype == torch.float16}
                for case in list(cases.values())[:most]:
                    marks = [pytest.mark.gpu] if device == "cuda" else []
                    yield pytest.param(op, case, device, id=f"{op.name}-{case.name}-{device}", marks=marks)


def _programs() -> list[Any]:
    """What the extension has."""
    found = [getattr(entry, "program", None) for calls in replay._caches for entry in calls.entries.values()]
    return [program for program in found if program is not None and not isinstance(program, str)]


@pytest.mark.parametrize("op, case, device", list(_operators()))
def test_every_operator_is_right(op: Op, case: Case, device: str) -> None:
    if reason := _declines(op, case, op.make_inputs(case, torch.float16, device), op.backend("triton")):
        pytest.skip(f"triton declines: {reason}")
    for seed in range(SETTLED):
        reports = verify(op, case, torch.float16, "triton", device, seed=seed)
        failures = [report.message for report in reports if not report.ok]
        assert not failures, f"call {seed + 1}: " + "\n".join(failures)
    assert _programs() or op.name in NEVER


def _settled(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of a call after enough of them, with their backward passes."""
    for _ in range(SETTLED):
        found = call(*args, **options)
        outputs = [x for x in (found if isinstance(found, tuple) else (found,)) if x.requires_grad]
        if outputs:
            torch.autograd.grad([x.float().sum() for x in outputs], [x for x in args if x.requires_grad])
    return call(*args, **options)


def _attention_inputs(device: str = "cpu") -> tuple[Tensor, ...]:
    q, k, v = (torch.randn(1, 20, 2, 16, device=device, requires_grad=True) for _ in range(3))
    return q, k, v, torch.randn(2, device=device, requires_grad=True)


def _attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, backend: str = "triton", **options: Any) -> Tensor:
    found = fk.attention(q, k, v, sinks=sinks, causal=True, window=7, backend=backend, **options)
    assert isinstance(found, Tensor) or options
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_a_training_step(device: str, repeated: list[Any]) -> None:
    """Also through views, lists of tensors, several outputs and products of torch."""

    def step(backend: str, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        x, residual = (torch.randn(2, 33, 64, device=device, requires_grad=True) for _ in range(2))
        weight, wide = (torch.randn(size, device=device, requires_grad=True) for size in ((64,), (3, 64, 64)))
        y, total = fk.rms_norm(x, weight, residual=residual, backend=backend)
        q, k, v = fk.linear(y, list(wide), backend=backend)
        heads = [z.view(2, 33, 4, 16) for z in (q, k, v)]
        q, k = fk.rope(*heads[:2], frequencies=fk.Frequencies.plain(16), backend=backend)
        o, lse = fk.attention(q, k, heads[2], causal=True, window=9, return_lse=True, backend=backend)
        y = fk.swiglu(o.view(2, 33, 64), total, backend=backend)
        loss = fk.cross_entropy(y.view(66, 64), torch.arange(66, device=device) % 64, backend=backend) + lse.sum()
        return [loss, *torch.autograd.grad(loss, (x, residual, weight, wide))]

    for seed in range(SETTLED + 4):
        if seed >= SETTLED:
            del repeated[:]
        for found, wanted in zip(step("triton", seed), step("torch", seed)):
            torch.testing.assert_close(found, wanted, atol=2e-2, rtol=1e-3)
    assert not repeated  # nothing is replayed in Python any more
    backward = [program.num_backward_programs for program in _programs() if hasattr(program, "num_backward_programs")]
    assert backward == [1] * 5  # rms_norm, rope, attention, swiglu and cross_entropy


def test_the_node_is_the_extensions() -> None:
    inputs = _attention_inputs()
    node = _settled(_attention, *inputs).grad_fn
    assert node.name() == "flashkernel::attention"
    assert [following.name() for following, _ in node.next_functions] == ["torch::autograd::AccumulateGrad"] * 4
    [operator] = [program for program in _programs() if hasattr(program, "num_backward_programs")]
    assert operator.num_backward_programs == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q.half(), lambda q: q[:, :19], lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
        lambda q: torch.cat([q, q], 1)[:, ::2], lambda q: torch.cat([q.flatten()] * 2)[1 : 1 + q.numel()].view(q.shape),
        lambda q: q.detach(), lambda q: q.detach().requires_grad_(),
    ],
    ids=["dtype", "size", "strides", "step", "alignment", "no-grad", "leaf"],
)  # fmt: skip
def test_calls_are_told_apart(change: Callable[[Tensor], Tensor]) -> None:
    _settled(_attention, *_attention_inputs())
    for _ in range(SETTLED):
        *given, sinks = _attention_inputs()
        q, k, v = (change(x) for x in given)
        found, wanted = (_attention(q, k, v, sinks, backend) for backend in ("triton", "torch"))
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)
        pairs = [torch.autograd.grad(y.float().square().sum(), sinks) for y in (found, wanted)]
        torch.testing.assert_close(*pairs, atol=2e-2, rtol=2e-2)


def test_plain_arguments_are_told_apart() -> None:
    x = torch.randn(4, 32)
    for _ in range(SETTLED):
        for eps in (1, 1.0, 1e-6, 0.25):
            found, wanted = (fk.rms_norm(x, eps=eps, backend=backend) for backend in ("triton", "torch"))
            torch.testing.assert_close(found, wanted)
        for mask in (fk.causal(), fk.window(3), fk.causal() & fk.window(5), None):
            q = x.view(1, 8, 1, 16)
            found, wanted = (
                fk.attention(q, q + 1, q - 1, mask=mask, backend=backend) for backend in ("triton", "torch")
            )
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wanted", [(0,), (1, 3), (2,), (0, 1, 2, 3)])
def test_some_gradients_are_wanted(wanted: tuple[int, ...]) -> None:
    inputs = _attention_inputs()
    _settled(_attention, *inputs)
    chosen = [inputs[index] for index in wanted]
    for _ in range(SETTLED):
        found, expected = (
            torch.autograd.grad(_attention(*inputs, backend=backend).square().sum(), chosen)
            for backend in ("triton", "torch")
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_some_gradients_are_given() -> None:
    """One of the outputs' gradients, the other's, both, and one in other strides."""
    inputs, scale = _attention_inputs(), torch.randn(1, 2, 20, 16)
    uses: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda o, _: o.square().sum(), lambda _, lse: lse.square().sum(), lambda o, lse: o.sum() + lse.sum(),
        lambda o, _: (o.transpose(1, 2) * scale).sum(),
    ]  # fmt: skip
    for _ in range(SETTLED):
        for use in uses:
            found, wanted = (
                torch.autograd.grad(use(*_attention(*inputs, backend=backend, return_lse=True)), inputs)
                for backend in ("triton", "torch")
            )
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_a_graph_that_is_kept_and_one_that_is_not() -> None:
    inputs = _attention_inputs()
    y = _settled(_attention, *inputs).square().sum()
    first, second = (torch.autograd.grad(y, inputs, retain_graph=keep) for keep in (True, False))
    torch.testing.assert_close(first, second)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(y, inputs)


def test_a_backward_pass_may_overwrite_what_it_saved_unless_the_graph_is_kept() -> None:
    x, w = torch.randn(6, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    target = torch.arange(6)
    for _ in range(SETTLED):
        loss = fk.linear_cross_entropy(x, w, target, backend="triton") * 3
        found = [torch.autograd.grad(loss, (x, w), retain_graph=keep) for keep in (True, True, False)]
        wanted = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ w.t(), target) * 3, (x, w))
        for one in found:
            torch.testing.assert_close(one, wanted, atol=1e-4, rtol=1e-4)


def test_what_was_saved_must_not_change() -> None:
    q, k, v, sinks = _attention_inputs()
    _settled(_attention, q, k, v, sinks)
    y = _attention(q, k, v, sinks).sum()
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_outputs_may_be_written_to_in_place() -> None:
    weight = torch.ones(32, requires_grad=True)
    for _ in range(SETTLED):
        x = torch.randn(2, 5, 32, requires_grad=True)
        found, wanted = (fk.rms_norm(x, weight, backend=backend).mul_(2).add_(1) for backend in ("triton", "torch"))
        torch.testing.assert_close(found, wanted)
        pair = [torch.autograd.grad(y.square().sum(), (x, weight)) for y in (found, wanted)]
        torch.testing.assert_close(*pair, atol=1e-4, rtol=1e-4)


def test_second_derivatives_are_refused() -> None:
    inputs = _attention_inputs()
    y = _settled(_attention, *inputs).square().sum()
    gradients = torch.autograd.grad(y, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradients[0].sum().backward()


@pytest.mark.parametrize("settled", [False, True])
def test_batched_gradients_run_in_python(settled: bool) -> None:
    """As torch.autograd.functional.jacobian(vectorize=True) asks for them: by the operators of torch.library."""
    inputs, do = _attention_inputs(), torch.randn(3, 1, 20, 2, 16)
    if settled:
        _settled(_attention, *inputs)
    found = torch.autograd.grad(_attention(*inputs), inputs, do, is_grads_batched=True)
    each = [torch.autograd.grad(_attention(*inputs, backend="torch"), inputs, one) for one in do]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*each))), atol=1e-4, rtol=1e-4)


def test_hooks_checkpoints_and_offloading() -> None:
    inputs = _attention_inputs()
    _settled(_attention, *inputs)
    wanted = torch.autograd.grad(_attention(*inputs, backend="torch").sum(), inputs)
    seen: list[Tensor] = []
    y = _attention(*inputs)
    y.register_hook(seen.append)
    y.grad_fn.register_prehook(lambda gradients: seen.extend(gradients))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), inputs), wanted, atol=1e-4, rtol=1e-4)
    assert len(seen) == 2
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or len(packed) - 1, packed.__getitem__):
        y = _attention(*inputs)
    assert len(packed) == 6  # q, k, v, sinks, o, lse
    torch.testing.assert_close(torch.autograd.grad(y.sum(), inputs), wanted, atol=1e-4, rtol=1e-4)
    for reentrant in (False, True):
        y = checkpoint(_attention, *inputs, use_reentrant=reentrant)
        y.sum().backward()
        torch.testing.assert_close(tuple(x.grad for x in inputs), wanted, atol=1e-4, rtol=1e-4)
        for x in inputs:
            x.grad = None


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in flashkernel")
def test_anomalies_are_found() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    _settled(fk.gelu, x, backend="triton")
    with torch.autograd.detect_anomaly(check_nan=True):
        y = fk.gelu(x, backend="triton")
        with pytest.raises(RuntimeError, match="flashkernel::activation' returned nan"):
            y.backward(torch.full_like(y, torch.nan))


def test_memory_is_freed_with_the_graph() -> None:
    inputs = _attention_inputs()
    _settled(_attention, *inputs)
    kept: list[weakref.ref[Tensor]] = []
    for _ in range(3):
        q, k, v, sinks = _attention_inputs()
        o = _attention(q, k, v, sinks)
        kept += map(weakref.ref, (q, k, v, sinks, o, *torch.autograd.grad(o.sum(), (q, k, v))))
    del q, k, v, sinks, o
    gc.collect()
    assert [reference() for reference in kept if reference() is not None] == []


def test_what_changes_calls_beside_their_arguments() -> None:
    x = torch.randn(12, 64)
    _settled(fk.rms_norm, x, backend="triton")
    served = fk.rms_norm.launch_cache.native
    call: tuple[Any, ...] = ((x,), {"backend": "triton"})
    missed: list[Any] = []
    assert served(*call) is not replay._MISSING
    with replay_switch.suspended():
        assert served(*call) is replay._MISSING
    with torch.autocast("cpu", torch.bfloat16):
        assert served(*call) is replay._MISSING
    with torch.autograd.forward_ad.dual_level():
        assert served(*call) is replay._MISSING
    with FlopCounterMode(display=False):
        assert served(*call) is replay._MISSING
    torch.func.vmap(lambda y: missed.append(served(*call)) or y)(torch.zeros(2, 1))
    assert missed == [replay._MISSING]
    tune.clear_cache()
    assert served(*call) is replay._MISSING
    compiled = torch.compile(lambda x: fk.rms_norm(x, backend="triton"), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), fk.rms_norm(x, backend="torch"))


def test_threads_run_backward_passes_side_by_side() -> None:
    inputs = [torch.randn(6, 16, requires_grad=True) for _ in range(4)]
    weights = [torch.randn(8, 16, requires_grad=True) for _ in range(4)]
    for x, w in zip(inputs, weights):
        _settled(fk.linear, x, w, backend="torch")
    wrong: list[int] = []

    def work(number: int) -> None:
        x, w = inputs[number], weights[number]
        for _ in range(40):
            found = torch.autograd.grad(fk.linear(x, w, backend="torch").square().sum(), (x, w))
            wanted = torch.autograd.grad((x @ w.t()).square().sum(), (x, w))
            if not all(map(torch.allclose, found, wanted)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_operations_of_torch_run_without_python() -> None:
    """Operations with lists, dtypes and numbers, and a kernel on a view of what came of them."""

    def call(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, zeros = zeroed(x)
        return y, zeros.fill_(0.5), torch.full((3,), 2.5, dtype=torch.float16)

    known = replay.LaunchCache(call, "call")
    for _ in range(SETTLED):
        x = torch.randn(16, 16)
        y, filled, halves = known((x,), {})
        torch.testing.assert_close(y, fk.rms_norm(x, backend="torch").view(-1))
        assert filled.shape == x.shape
        assert (filled == 0.5).all()
        assert halves.tolist() == [2.5] * 3
    [entry] = known.entries.values()
    assert len(known.native) == 1
    inputs = describe.Inputs([0], 1)
    kinds = [step["kind"] for step in describe._Description(entry, inputs, True).whole()["steps"]]
    assert kinds.count("operation") == 4


# Takes notes of launches: the function, and the values of its first three parameters.
DRIVER = """
#include <stdint.h>
#include <string.h>
static uint64_t noted[4096];
static int launches = 0, next_status = 0;
extern "C" int take(void* config, void* function, void** params, void* extra) {
  uint64_t* note = noted + 4 * launches++;
  note[0] = (uint64_t)function;
  note[1] = *(uint64_t*)params[0];
  note[2] = *(uint32_t*)params[1];
  memcpy(note + 3, (char*)params[2] + MAP_OFFSET, 8);
  int status = next_status;
  next_status = 0;
  return status;
}
extern "C" int replace(void* map, void* address) { memcpy((char*)map + MAP_OFFSET, &address, 8); return 0; }
extern "C" uint64_t* notes() { return noted; }
extern "C" int count() { return launches; }
extern "C" void fail(int status) { next_status = status; }
"""


@pytest.fixture(params=["pointer", "map", "opaque map"])
def recorded_launch(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, Any]]:
    """(a driver that takes notes, a recording of a launch whose third parameter is a pointer, a tensor map that has its
    address in a word, or one that has it between words)."""
    offset = {"pointer": 0, "map": 24, "opaque map": 3}[request.param]
    source = tmp_path / "driver.cpp"
    source.write_text(DRIVER.replace("MAP_OFFSET", str(offset)))
    library = cpp.library(source)
    library.notes.restype = ctypes.POINTER(ctypes.c_uint64)

    def encode(self: TensorMap, address: int) -> bytes:
        return bytes(offset) + address.to_bytes(8, "little") + bytes(120 - offset)

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    monkeypatch.setattr(TensorMap, "encode", encode)
    monkeypatch.setattr(driver, "launch", lambda: library.take)
    monkeypatch.setattr(driver, "replace_address", lambda: library.replace)
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuGetErrorName=lambda code, text: 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x77, raising=False)
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", empty, raising=False)
    monkeypatch.setattr(recording, "SourceWriter", lambda device_index: recording_steps.SourceWriter(0))

    def forward(x: Tensor) -> Tensor:
        out = torch.empty(4, 8)
        last = ("P", out) if offset == 0 else ("M", TensorMap(out, 9, (8, 4), (32,), (8, 4), 3, False))
        launch.notify_launch(LaunchRecord("kernel", (("P", x[1:]), ("i", 7), last), 0x1234, (4, 1, 1)))
        launch.mark_written(x)
        return out.view(32)

    x = torch.zeros(4, 8)
    _, recorded = recording.record(lambda: forward(x), [x])
    assert isinstance(recorded, recording.Recording), recorded
    return library, recorded


def test_a_launch_writes_the_addresses_of_its_tensors(recorded_launch: tuple[Any, Any], in_cpp: Any) -> None:
    library, recorded = recorded_launch
    program = describe.program(in_cpp, recorded)
    assert not program.needs_python
    before = library.count()
    for number in range(before, before + 3):
        x = torch.zeros(4, 8)
        version = x._version
        [result] = program.run([x])
        assert result.shape == (32,)
        assert x._version == version + 1
        assert library.count() == number + 1
        assert library.notes()[4 * number : 4 * number + 4] == [0x1234, x.data_ptr() + 32, 7, result.data_ptr()]


def test_a_launch_that_fails(recorded_launch: tuple[Any, Any], in_cpp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread without a CUDA context makes one and launches again; any other status is an error."""
    library, recorded = recorded_launch
    program = describe.program(in_cpp, recorded)
    made: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.append(library.count()))
    before = library.count()
    library.fail(201)
    x = torch.zeros(4, 8)
    [result] = program.run([x])
    assert made == [before + 1]
    assert library.notes()[4 * before + 4 : 4 * before + 8] == [0x1234, x.data_ptr() + 32, 7, result.data_ptr()]
    library.fail(700)
    with pytest.raises(RuntimeError, match="the launch of kernel failed"):
        program.run([x])


def test_graphs_that_capture_keep_tables_alive(in_cpp: Any, tmp_path: Path) -> None:
    """A description with a table that outlives the call; the driver says that the stream is captured, then that not."""
    source = tmp_path / "driver.cpp"
    source.write_text('extern "C" int capturing(void* stream, int* status) { *status = stream != 0; return 0; }')
    library, kept = cpp.library(source), []
    view = {**describe.whole_slot(0), "dtype": torch.float32}
    for stream, expected in ((0x77, 1), (0, 0)):
        tables = {"tables": ["table"], "keep_alive": kept.append, "stream": stream,
                  "is_capturing": describe._address(library.capturing)}  # fmt: skip
        program = in_cpp.Program({
            "num_given": 1, "num_slots": 1, "constants": [], "steps": [], "results": [view], "persistent": tables,
        })  # fmt: skip
        [x] = program.run([torch.ones(2)])
        assert x.tolist() == [1, 1]
        assert len(kept) == expected
        del kept[:]


def test_a_source_that_does_not_compile_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-include", "missing.h"))
    monkeypatch.setattr(build, "path", lambda: tmp_path / "replay.so")
    build._main()
    assert "missing.h" in build.failure_path().read_text()
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.setattr(build, "_looked", -100.0)
    monkeypatch.setattr(build.subprocess, "Popen", lambda *_, **__: pytest.fail("it is built again"))
    build.request()
    assert str(build.failure_path()) in build.status()
