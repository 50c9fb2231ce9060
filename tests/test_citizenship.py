"""Torch citizenship, generated from the declarations: opcheck, torch.compile, autocast, CUDA graphs, gradcheck.

The kernels' own registrations are checked under Triton's interpreter on a CPU and for real on a GPU.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from cuda_emulator import emulated
from cuda_graphs import capture
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import flashkernel
from flashkernel.core import cpp, tune
from flashkernel.core.check import compare, execute, named, wanted_gradients
from flashkernel.core.library import KernelOp
from flashkernel.core.op import Case, Op, Tolerance
from flashkernel.ops import registry
from flashkernel.ops.gemm.configs import LINEAR, LinearConfig

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
OPS = list(registry().values())
CPP = {"append_kv", "decode_attention", "quantized_linear"}  # whose first case C++ kernels serve on a CPU
CACHED = {"append_kv", "decode_attention", "paged_attention"}  # on a CPU they read page tables
by_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def _some_cases(op: Op) -> list[Case]:
    """The first case, the one with most optional inputs, and the one with most options."""
    whole = [case for case in op.cases if case.gradients] or list(op.cases)
    picks = [whole[0], max(whole, key=lambda case: len(case.present)), max(whole, key=lambda case: len(case.options))]
    return list({case.name: case for case in picks}.values())


def _by_case() -> list[object]:
    return [pytest.param(op, case, id=f"{op.name}-{case.name}") for op in OPS for case in _some_cases(op)]


by_case = pytest.mark.parametrize("op, case", _by_case())


def _kernel_backend(op: Op) -> str:
    names = [backend.name for backend in op.backends]
    return next(name for name in ("triton", "cuda", "torch") if name in names)


def _kernel_dtype(op: Op) -> torch.dtype:
    return torch.float16 if _kernel_backend(op) == "cuda" else torch.float32


def _kernels_run(op: Op, device: str) -> AbstractContextManager[None]:
    """CUDA C++ kernels run on a CPU in the emulator, as Triton's do in its interpreter."""
    return emulated() if _kernel_backend(op) == "cuda" and device == "cpu" else nullcontext()


@on_devices
@by_case
def test_opcheck(op: Op, case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, fake kernel and autograd registration of every registered operator that the call passes through."""
    seen: list[tuple[KernelOp, tuple]] = []
    call = KernelOp.__call__

    def recorded(self: KernelOp, *args: object) -> object:
        seen.append((self, args if self.flatten is None else self.flatten(*args)))
        return call(self, *args)

    monkeypatch.setattr(KernelOp, "__call__", recorded)
    inputs = op.make_inputs(case, _kernel_dtype(op), device)
    options = {**case.options, "backend": _kernel_backend(op)}
    with _kernels_run(op, device):
        execute(op.call, inputs, options, wanted_gradients(op, case, inputs))
        monkeypatch.undo()
        assert seen, f"{op.name} passed through no registered operator"
        for kernel, args in seen:
            fresh = tuple(_fresh(value, kernel.function is not None) for value in args)
            torch.library.opcheck(kernel.registered, fresh, test_utils=_checks(op, case))


@pytest.mark.parametrize("kind", ["fake", "meta"])
@pytest.mark.parametrize("op", [op for op in OPS if op.name not in CACHED], ids=lambda op: op.name)
def test_shapes_follow_without_values(op: Op, kind: str) -> None:
    """Under FakeTensorMode and on the meta device, where tools estimate memory or count operations."""
    case = _some_cases(op)[0]
    inputs, options = op.make_inputs(case, torch.float32, "cpu"), dict(case.options)
    if op.backend("torch").composite:
        options["backend"] = "torch"
    expected = op.call(**inputs, **options)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else nullcontext()
    with mode:
        convert = mode.from_tensor if isinstance(mode, FakeTensorMode) else lambda x: x.to("meta")
        found = op.call(**tree_map_only(torch.Tensor, convert, inputs), **options)
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert one.is_meta or isinstance(one, FakeTensor)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def _checks(op: Op, case: Case) -> tuple[str, ...]:
    """All of opcheck's for the first case; a trace with symbolic shapes, the longest of them, for no other, which
    test_compile_fullgraph traces."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    return checks if case is _some_cases(op)[0] else checks[:3]


def _fresh(value: object, differentiable: bool) -> object:
    """A leaf of its own; an operator without a gradient (a backward pass, say) gets inputs that want none."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(differentiable and value.requires_grad)


def _by_shapes() -> Iterator[object]:
    """On the GPU the first case with static and with dynamic shapes, the others with static ones. On the CPU every case
    once, the first with dynamic shapes (for the kernels) and the others with static ones: tracing with symbols takes
    torch seconds."""
    for op in OPS:
        for place, case in enumerate(_some_cases(op)):
            for kind in ("static", "dynamic"):
                name, dynamic = f"{kind}-{op.name}-{case.name}", kind == "dynamic"
                if dynamic == (place == 0):
                    yield pytest.param(op, case, "cpu", dynamic, id=f"{name}-cpu")
                if place == 0 or not dynamic:
                    yield pytest.param(op, case, "cuda", dynamic, id=f"{name}-cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("op, case, device, dynamic", list(_by_shapes()))
def test_compile_fullgraph(op: Op, case: Case, device: str, dynamic: bool) -> None:
    """One graph without breaks, forward and backward, as exact as eager mode on the same backend. On a GPU inductor
    writes kernels for the torch backend, which takes minutes in all: for the first case with static shapes only."""
    inputs = op.make_inputs(case, _kernel_dtype(op), device)
    wanted = wanted_gradients(op, case, inputs)
    doubled = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    exact = execute(op.observed(op.plain), doubled, case.options, wanted)
    compiler = "aot_eager" if device == "cpu" else "inductor"
    torch_too = device == "cpu" or (case is _some_cases(op)[0] and not dynamic)
    for backend in dict.fromkeys([*["torch"] * torch_too, _kernel_backend(op)]):
        torch._dynamo.reset()
        options = {**case.options, "backend": backend}
        symbols = dynamic and (device == "cuda" or backend != "torch")
        compiled = op.observed(torch.compile(op.call, fullgraph=True, dynamic=symbols, backend=compiler))
        with _kernels_run(op, device):
            mine = execute(compiled, inputs, options, wanted)
            eager = execute(op.observed(op.call), inputs, options, wanted)
        tolerance = Tolerance(factor=op.tolerance.factor, floor=4.0)  # inductor rounds in other places
        reports = [
            compare(name, mine.outputs[name], exact.outputs[name], eager.outputs[name], tolerance)
            for name in exact.outputs
        ]
        reports += [
            compare(f"d{name}", mine.gradients[name], exact.gradients[name], eager.gradients[name], tolerance)
            for name in wanted
        ]
        failures = [report.message for report in reports if not report.ok]
        assert not failures, "\n".join(failures)


def _counters_of_streams(monkeypatch: pytest.MonkeyPatch, made: Callable[[], object]) -> Callable[[int], torch.Tensor]:
    """The counters of a stream, as if no kernel had used any; `made` is called when a table is made, of 32 streams."""
    kernels = importlib.import_module("flashkernel.ops.gemm.counters")

    def zeros(where: torch.device) -> torch.Tensor:
        made()
        return torch.arange(64).view(32, 2)

    def counters(stream: int) -> torch.Tensor:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda where: SimpleNamespace(cuda_stream=stream))
        return kernels.counters(torch.device("cuda:0"))

    monkeypatch.setattr(kernels, "_tables", {})
    monkeypatch.setattr(kernels, "_rows", {})
    monkeypatch.setattr(kernels, "_zeros", zeros)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return counters


def test_counters_that_stay_are_not_made_where_a_graph_may_own_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile sends what the calling thread allocates to its graph's memory, also before it captures."""
    makers: list[int] = []
    counters = _counters_of_streams(monkeypatch, lambda: makers.append(threading.get_ident()))
    assert [counters(stream).tolist() for stream in (7, 7, 8)] == [[0, 1], [0, 1], [2, 3]]
    assert len(makers) == 1
    assert makers[0] != threading.get_ident()


def test_no_two_streams_share_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches on two streams may run at the same time, of however many that there are."""
    tables: list[None] = []
    counters = _counters_of_streams(monkeypatch, lambda: tables.append(None))
    found = [counters(stream) for stream in range(70)]
    assert len({row.data_ptr() for row in found}) == 70
    assert len(tables) == 3
    assert [counters(stream).data_ptr() for stream in range(70)] == [row.data_ptr() for row in found]


@pytest.mark.gpu
def test_a_compiled_graph_may_be_the_first_to_share_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = importlib.import_module("flashkernel.ops.gemm.counters")
    monkeypatch.setattr(kernels, "_tables", {})
    monkeypatch.setattr(kernels, "_rows", {})
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2000, 4096, device="cuda", dtype=torch.bfloat16) / 64
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: flashkernel.linear(x, weight, backend="triton"), mode="reduce-overhead")
    with torch.no_grad(), tune.override(LINEAR, LinearConfig("tensor", 64, 128, 4, 4, 131)):
        found = [compiled(x).clone() for _ in range(5)]  # warmed up, recorded, replayed
        expected = flashkernel.linear(x, weight, backend="triton")
    assert all(torch.equal(one, expected) for one in found)
    torch._dynamo.reset()


@by_case
def test_gradcheck(op: Op, case: Case) -> None:
    """The reference's gradients are those of its values, in float64."""
    if not op.differentiable:
        pytest.skip("not differentiable")
    drawn = op.make_inputs(case, torch.float64)
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in drawn.items()}
    wanted = wanted_gradients(op, case, inputs)

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = named(op.plain(**{**inputs, **dict(zip(wanted, values))}, **case.options))
        return tuple(value for value in outputs.values() if value.is_floating_point())

    assert torch.autograd.gradcheck(
        function, [inputs[name].clone().requires_grad_() for name in wanted], fast_mode=True
    )


@on_devices
@by_op
def test_autocast(op: Op, device: str) -> None:
    """Under autocast a call runs, gives finite values, and its gradients keep the parameters' dtype."""
    case = op.cases[0]
    inputs = op.make_inputs(case, torch.float32, device)
    wanted = wanted_gradients(op, case, inputs)
    with torch.autocast(device, dtype=torch.bfloat16):
        run = execute(op.observed(op.call), inputs, case.options, wanted)
    plain = execute(op.observed(op.call), inputs, case.options, wanted)
    for name, value in run.outputs.items():
        assert value.shape == plain.outputs[name].shape
        assert torch.isfinite(value.float()).all()
    for name in wanted:
        assert run.gradients[name].dtype == inputs[name].dtype


@pytest.mark.gpu
@by_op
def test_cuda_graph(op: Op) -> None:
    """A captured call replays on new inputs."""
    case = op.cases[0]
    inputs = op.make_inputs(case, torch.float16, "cuda")
    run = lambda: named(op.observed(op.call)(**inputs, **case.options))  # noqa: E731
    graph, captured = capture(run)
    fresh = op.make_inputs(case, torch.float16, "cuda", seed=5)
    for name, value in inputs.items():
        value.copy_(fresh[name])
    graph.replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        eager = run()
    for name in eager:
        assert torch.equal(captured[name], eager[name])


@by_op
def test_overrides_and_explanations(op: Op) -> None:
    """Per-call and scoped choice of a backend; refusals name every backend with its reason."""
    case = op.cases[0]
    inputs = op.make_inputs(case, torch.float32)
    serves = op.name in CPP and cpp.can_compile() is None
    assert flashkernel.explain(op.call, **inputs, **case.options).chosen == ("cpp" if serves else "torch")
    with flashkernel.use_backend("reference"):
        assert flashkernel.explain(op.call, **inputs, **case.options).chosen == "reference"
    with flashkernel.use_backend(**{op.name: "reference"}):
        assert flashkernel.explain(op.call, **inputs, **case.options).chosen == "reference"
        assert flashkernel.explain(op.call, **inputs, **case.options, backend="torch").chosen == "torch"
    with pytest.raises(flashkernel.BackendError) as refusal:
        op.call(**inputs, **case.options, backend="abacus")
    for backend in op.backends:
        assert backend.name in str(refusal.value)


@by_op
def test_declining_backend_raises_with_its_reason(op: Op) -> None:
    case = op.cases[0]
    inputs = op.make_inputs(case, torch.float64)
    if all(value.dtype != torch.float64 for value in inputs.values()):
        pytest.skip("its inputs have dtypes of their own")
    with _kernels_run(op, "cpu"), pytest.raises(flashkernel.BackendError, match="float64"):
        op.call(**inputs, **case.options, backend=_kernel_backend(op))
