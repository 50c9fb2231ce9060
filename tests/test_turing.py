"""What a T4 runs: which backend serves each operator and each layer of a model there, and its kernels, executed on the
GPU at hand.

`tests/turing.py` compiles Triton kernels to PTX for sm_75 and launches that; test_compile.py compiles them anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import turing
from test_compile import launches_of

from flashkernel.core import cuda, dispatch
from flashkernel.core import device as devices
from flashkernel.core.check import verify
from flashkernel.core.driver import LaunchRecord
from flashkernel.core.launch import collect_launches
from flashkernel.core.op import Backend, Call, Case, Op
from flashkernel.core.shapes import MODELS
from flashkernel.engine import step_memory
from flashkernel.engine.build import _dtype
from flashkernel.engine.dummy_weights import dummy_transformer
from flashkernel.engine.precompile import EngineSizes
from flashkernel.engine.transformer import ModelInput
from flashkernel.kvcache import PageStorage, Step
from flashkernel.lab import doctor
from flashkernel.lab.selection import bench_dtypes, explain_case
from flashkernel.ops import registry

T4 = devices.KNOWN["t4"]

# What Llama and GPT-2 models are made of, in training and in generation.
MODEL_OPERATORS = (
    "attention", "decode_attention", "paged_attention", "linear", "append_kv", "rope", "rms_norm", "layer_norm",
    "swiglu", "gelu", "silu", "cross_entropy", "linear_cross_entropy", "softmax",
)  # fmt: skip
# Served by CUDA C++: Triton has no tensor-core code for sm_75.
WITH_PRODUCTS = ("attention", "attention_fp8", "decode_attention", "paged_attention", "rotary_attention")


def _by_triton() -> list[Op]:
    """Operators whose first benchmark Triton serves on a T4."""
    return [
        op for op in registry().values()
        if explain_case(op, op.benches[0], torch.float16, T4).chosen == "triton"
    ]  # fmt: skip


def _runs() -> Iterator[object]:
    """For each operator the first two cases and one whose rows are not contiguous, in float16; the first in float32."""
    for op in registry().values():
        if not any(backend.name == "triton" for backend in op.backends) or op.name in WITH_PRODUCTS:
            continue
        chosen = [*op.cases[:2], *[case for case in op.cases if case.layout == "padded"][:1]]
        for index, case in enumerate({case.name: case for case in chosen}.values()):
            for dtype in (torch.float16, torch.float32)[: 2 if index == 0 else 1]:
                if dtype in case.dtypes:
                    name = str(dtype).removeprefix("torch.")
                    yield pytest.param(op, case, dtype, id=f"{op.name}-{case.name}-{name}")


@pytest.mark.gpu
@pytest.mark.parametrize("op, case, dtype", list(_runs()))
def test_triton_kernels_run_as_turing_code(op: Op, case: Case, dtype: torch.dtype) -> None:
    """PTX for sm_75 of Triton's kernels, forward and backward, gives right results."""
    with turing.turing() as launched:
        inputs = op.make_inputs(case, dtype, "cuda")
        reason = _declined(op, case, inputs)
        if reason is not None:
            pytest.skip(reason)
        failures = [report.message for report in verify(op, case, dtype, "triton", "cuda") if not report.ok]
        torch.cuda.synchronize()
    assert launched, "no Triton kernel was launched"
    assert not failures, "\n".join(failures)


def _declined(op: Op, case: Case, inputs: dict[str, torch.Tensor]) -> str | None:
    from flashkernel.core.dispatch import explain

    verdicts = explain(op.call, **inputs, **case.options).verdicts
    return next(verdict.reason for verdict in verdicts if verdict.backend == "triton")


@pytest.mark.compile
@pytest.mark.parametrize("name", ["rms_norm", "rope", "append_kv", "linear", "moe_route"])
def test_a_turing_launch_is_ptx_with_its_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the driver: the PTX is for sm_75, and its entry has as many parameters as are packed."""
    loaded: list[tuple[str, str]] = []
    monkeypatch.setattr(turing, "load", lambda ptx, entry, shared, index: (None, loaded.append((ptx, entry)) or 0))
    op = registry()[name]
    for launch in launches_of(op, op.benches[0], torch.float16, 75):
        code = turing._code(launch, 0)
        record = turing.launching._launch_record(launch.kernel, code, launch.grid, launch.args, launch.constants)
        assert isinstance(record, LaunchRecord), record
        ptx, entry = loaded[-1]
        assert ".target sm_75" in ptx
        header = ptx[ptx.index(f".entry {entry}") :].partition("{")[0]
        assert header.count(".param") == len(record.params)
        assert record.grid[0] == launch.grid[0]


@pytest.mark.parametrize("name", MODEL_OPERATORS)
def test_no_operator_of_a_model_is_left_to_torch(name: str) -> None:
    op = registry()[name]
    answer = explain_case(op, op.benches[0], torch.float16, T4)
    assert answer.chosen in ("triton", "cuda"), str(answer)


def test_operators_without_products_are_served_by_triton() -> None:
    served = {op.name for op in _by_triton()}
    assert {"rms_norm", "layer_norm", "swiglu", "gelu", "cross_entropy", "linear_cross_entropy", "append_kv", "rope",
            "softmax", "sum", "linear"} <= served  # fmt: skip


Choices = dict[str, dict[str, set[torch.dtype]]]  # operator -> backend -> dtypes


@contextmanager
def on_a_t4(monkeypatch: pytest.MonkeyPatch) -> Iterator[Choices]:
    """Inside, calls of tensors without data are dispatched as on a T4, and nothing is launched. Yields the choices."""
    choices: Choices = {}
    decide = dispatch._decide

    def noted(op: Op, forced: str | None, call: Call) -> Backend:
        chosen = decide(op, forced, call)
        choices.setdefault(op.name, {}).setdefault(chosen.name, set()).add(call.dtype)
        return chosen

    with monkeypatch.context() as patched, devices.pretend(T4), collect_launches():
        patched.setattr(dispatch, "_decide", noted)
        patched.setattr(cuda, "emulator", lambda *launch: None)
        yield choices


def _assert_kernels_in_float16(choices: Choices, allowed: frozenset[tuple[str, str]] = frozenset()) -> None:
    for name, backends in choices.items():
        for backend, dtypes in backends.items():
            assert backend in ("triton", "cuda") or (name, backend) in allowed, f"{name} runs on {backend}"
            assert dtypes == {torch.float16}, f"{name} computes in {dtypes}"


@pytest.mark.parametrize("model, learned_positions", [("llama-3.2-1b", False), ("gpt2", True)])
@pytest.mark.parametrize("decodes, prompt", [(1, 0), (16, 0), (64, 0), (0, 32), (0, 300), (3, 100)])
def test_the_engine_runs_on_kernels(
    model: str, learned_positions: bool, decodes: int, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of the engine: decoding sequences, and tokens of a prompt. Products of many rows are cuBLAS's."""
    shape, tokens, sequences = replace(MODELS[model], layers=1), decodes + prompt, decodes + (prompt > 0)

    def integers(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    with on_a_t4(monkeypatch) as choices, torch.inference_mode():
        made = dummy_transformer(shape, "meta", devices.model_dtype(T4), learned_positions=learned_positions)
        storage = PageStorage(1, 64, 16, shape.kv_heads, shape.head_dim, device="meta")
        slots, ids = integers(tokens, dtype=torch.int64), integers(tokens, dtype=torch.int64)
        step = Step(integers(sequences, 32), integers(sequences), slots, integers(tokens), integers(sequences + 1))
        logits = made.forward(ModelInput(ids, step, decodes, integers(sequences, dtype=torch.int64)), storage.layers)
    assert logits.shape == (sequences, shape.vocab)
    assert storage.dtype == torch.float16
    assert {"linear", "append_kv", "decode_attention" if decodes else "paged_attention"} <= choices.keys()
    _assert_kernels_in_float16(choices, frozenset({("linear", "torch")}) if tokens > 64 else frozenset())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_patched_model_runs_on_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers: Any = pytest.importorskip("transformers")
    from transformers import masking_utils

    import flashkernel.hf

    sizes = {
        "llama": transformers.LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=1,
                                          num_attention_heads=4, num_key_value_heads=2, vocab_size=100),
        "gpt2": transformers.GPT2Config(n_embd=256, n_layer=1, n_head=4, vocab_size=100, bos_token_id=0,
                                        eos_token_id=0),
    }  # fmt: skip
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)  # it reads values
    with on_a_t4(monkeypatch) as choices, torch.no_grad():
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(sizes[name], dtype=devices.model_dtype(T4)).eval()
        flashkernel.hf.patch(model)
        ids = torch.zeros((2, 128), dtype=torch.int64, device="meta")
        model(ids, labels=ids, use_cache=False)
    assert {"attention", "cross_entropy"} <= choices.keys()
    _assert_kernels_in_float16(choices)


@pytest.mark.parametrize(
    "requested, stored, gpu, expected",
    [(None, "bfloat16", "t4", torch.float16), (None, "unknown", "t4", torch.float16),
     (None, "float32", "t4", torch.float16), ("float32", "bfloat16", "t4", torch.float32),
     ("float16", "bfloat16", "t4", torch.float16), (None, "float32", "a100", torch.float32),
     (None, "float16", "a100", torch.float16), (None, "unknown", "a100", torch.bfloat16),
     (None, "bfloat16", "a100", torch.bfloat16), ("bfloat16", "float16", "a100", torch.bfloat16)],
)  # fmt: skip
def test_the_dtype_of_a_served_model(requested: str | None, stored: str, gpu: str, expected: torch.dtype) -> None:
    assert _dtype(requested, stored, devices.KNOWN[gpu]) == expected


@pytest.mark.parametrize("learned_positions", [False, True])
def test_a_step_in_the_default_dtype_fits_a_t4(learned_positions: bool) -> None:
    """No operator of a step falls to one of torch's that materializes all scores, as those of float32 do."""
    shape = replace(MODELS["gpt2"], layers=1)
    dtype = _dtype(None, "float32", T4)
    model = dummy_transformer(shape, "meta", dtype, learned_positions=learned_positions, max_position_embeddings=1024)
    memory = step_memory.measure(model, EngineSizes(256, 8192, 1024, 16, dtype), T4)
    assert memory.buffers + 2 * memory.step < 2**30


def test_bfloat16_is_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="bfloat16 needs sm_80 or newer, and Tesla T4 is sm_75; use dtype='float16'"):
        _dtype("bfloat16", "float32", T4)


def test_benchmarks_take_float16_for_bfloat16() -> None:
    case = Case("two", {}, dtypes=(torch.bfloat16, torch.float32))
    assert bench_dtypes(case, None, T4) == [torch.float16, torch.float32]
    assert bench_dtypes(case, None, devices.KNOWN["a100"]) == [torch.bfloat16, torch.float32]


class TestDoctor:
    def _findings(self) -> dict[str, doctor.Finding]:
        with devices.pretend(T4):
            return {found.name: found for found in doctor._before_ampere()}

    def test_says_what_a_t4_uses(self) -> None:
        found = self._findings()
        assert "models run in float16" in found["dtype"].detail
        assert {"rms_norm", "rope", "append_kv"} <= set(found["triton"].detail.replace(",", "").split())
        assert {"attention", "decode_attention", "linear"} <= set(found["cuda"].detail.replace(",", "").split())
        assert "NVRTC" in found["cuda"].detail

    def test_says_what_falls_to_torch_without_nvrtc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda, "can_compile", lambda: "cuda-core cannot be imported")
        found = self._findings()["cuda"]
        assert (found.status, found.advice) == ("missing", "pip install 'flashkernel[cuda]'")
        assert {"attention", "decode_attention", "linear"} <= set(found.detail.replace(",", "").split())

    def test_newer_gpus_have_nothing_to_say(self) -> None:
        with devices.pretend(devices.KNOWN["a100"]):
            assert list(doctor._before_ampere()) == []
