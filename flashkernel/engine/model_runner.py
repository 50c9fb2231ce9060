"""The model runner: runs steps on the device. It fills the inputs, computes logits, samples, and copies tokens back.

On a GPU a step is padded to one of a list of shapes (step_shapes.py), and is a CUDA graph that `warm_up` captured
before the first request. Everything a graph reads is at a fixed address. The token that a sequence decodes next is read
from where the last step wrote it, so a step can be launched before the host has seen the tokens of the step before.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from flashkernel.core import build_counter
from flashkernel.core.device import properties
from flashkernel.engine import cpu_decode
from flashkernel.engine.input_buffers import InputBuffers
from flashkernel.engine.outputs import TokenLogprob
from flashkernel.engine.sampler import (
    FIELDS,
    RowSamplingParams,
    SamplerOutput,
    SamplingStates,
    logprobs_of,
    sample,
)
from flashkernel.engine.scheduler import SchedulerOutput
from flashkernel.engine.sequence import Sequence
from flashkernel.engine.step_shapes import StepShape, StepShapes
from flashkernel.engine.transformer import ModelInput, Transformer
from flashkernel.kvcache import BatchTensors, KVCache, PageStorage, Step

Progress = Callable[[str, int, int], None]  # what, how many are done, of how many


@dataclass
class LaunchedStep:
    """A step that was launched; `read` waits for its tokens."""

    sequences: list[Sequence]
    results: list[Tensor]  # on the host once `done` has passed: tokens, then log probabilities if asked for
    done: torch.cuda.Event | None
    logprob_indices: list[int]  # sequences that have log probabilities
    assumed: list[int | None] = field(default_factory=list)  # the token of a draft that each sample needs to be right
    scored: list[tuple[Sequence, int, int]] = field(default_factory=list)  # sequence, position, the token after it
    scores: list[Tensor] = field(default_factory=list)  # on the host, as `results`: log probabilities of `scored`
    waited_s: float = 0.0  # that `read` waited for the device

    def read(self) -> tuple[list[int], dict[int, TokenLogprob]]:
        """The token of each sequence, and log probabilities by the index of sequences that ask for them."""
        if self.done is not None:
            began = time.monotonic()
            self.done.synchronize()
            self.waited_s = time.monotonic() - began
        token_ids, *logprobs = (result.tolist() for result in self.results)
        return token_ids, {
            index: TokenLogprob(token_ids[index], logprob, tuple(zip(top_ids, top)), rank)
            for index, logprob, top, top_ids, rank in zip(self.logprob_indices, *logprobs)
        }

    def read_prompt_logprobs(self) -> Iterator[tuple[Sequence, int, TokenLogprob]]:
        """(sequence, position, log probability of the token after it), once `read` has waited for them."""
        for (sequence, position, token), logprob, top, top_ids, rank in zip(
            self.scored, *(scores.tolist() for scores in self.scores)
        ):
            best = tuple(zip(top_ids, top))[: sequence.params.prompt_logprobs]
            yield sequence, position, TokenLogprob(token, logprob, best, rank)


@dataclass(frozen=True)
class StepGraph:
    """A captured step: replaying it computes `output`."""

    graph: torch.cuda.CUDAGraph
    output: SamplerOutput


class ModelRunner:
    """A transformer, its KV cache, and the buffers between host and device."""

    def __init__(
        self,
        model: Transformer,
        storage: PageStorage,
        cache: KVCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enforce_eager: bool,
    ) -> None:
        self.model, self.storage, self.cache, self.device = model, storage, cache, model.device
        self.padded = self.device.type != "cpu"
        self._enforce_eager = enforce_eager
        # Experts on GPUs before sm_80 run on torch's backend, which reads the router's choice on the host.
        capturable = model.config.num_experts == 0 or properties(self.device).arch >= 80
        self.use_graphs = self.padded and not enforce_eager and capturable
        self.shapes = StepShapes(max_num_seqs, max_num_batched_tokens)
        self.settings = RowSamplingParams(max_num_seqs)
        self.states = SamplingStates(max_num_seqs + 1, model.config.vocab_size, self.device)
        self._padding_row = max_num_seqs
        num_tokens = max_num_batched_tokens + max_num_seqs  # decodes are padded apart from prompts
        self._batch_tensors = BatchTensors(cache, 2 * max_num_seqs, num_tokens, self.device)
        names = ("rows", "decode_rows", "logits_indices")
        fields = dict.fromkeys(names, (torch.int64, max_num_seqs))
        fields |= {name: (dtype, width * max_num_seqs) for name, (dtype, width) in FIELDS.items()}
        self._buffers = InputBuffers({**fields, "input_ids": (torch.int64, num_tokens)}, self.device)
        self._last_token_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self.device)  # by row
        self._settings_views: dict[int, dict[str, Tensor]] = {}  # by number of logits
        self._graphs: dict[StepShape, StepGraph] = {}
        # One stream for all captures: kernels that keep counters keep a row of them for each stream.
        self._stream = torch.cuda.Stream(self.device) if self.use_graphs else None
        self._last_stream = self._current_stream()  # on it weights were loaded, or the last step was launched
        self._pool = torch.cuda.graph_pool_handle() if self.use_graphs else None

    @property
    def num_graphs(self) -> int:
        """Graphs that were captured."""
        return len(self._graphs)

    def warm_up(self, progress: Progress = lambda what, done, total: None) -> None:
        """Runs a padded step of every shape, which compiles its kernels, and captures it.

        Nothing is left to compile or capture in service. On a CPU there are a few C++ kernels to compile.
        """
        if not self.padded:
            cpu_decode.compile_kernels(self.model, progress)
            return
        build_counter.watch_triton()
        shapes = self.shapes.all()
        with self._on_device(), _without_gc():
            for index, shape in enumerate(shapes):
                progress("capturing" if self.use_graphs else "compiling", index, len(shapes))
                self._prepare_shape(shape)
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # of the steps that ran before their captures
            # What runs beside the graphs: log probabilities, and the state of rows.
            indices = torch.zeros(1, dtype=torch.int64, device=self.device)
            token_ids = torch.zeros(1, dtype=torch.int64, device=self.device)
            logits = torch.zeros(1, self.model.config.vocab_size, device=self.device)
            logprobs_of(SamplerOutput(token_ids, logits), indices, 1)
        progress("ready", len(shapes), len(shapes))

    def run_padding(self, shape: StepShape) -> None:
        """Runs a step of padding once, launch by launch."""
        with self._on_device():
            self._prepare(SchedulerOutput(), [], shape)()

    def launch(self, scheduled: SchedulerOutput) -> LaunchedStep:
        """Launches a step and samples a token for each of `scheduled.sampled`."""
        with self._on_device():
            self._follow_last_step()
            return self._launch(scheduled)

    def _on_device(self) -> _OnDevice:
        return _OnDevice(self.device)

    def _current_stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def _follow_last_step(self) -> None:
        """Makes the current stream, which each thread and caller may set, wait for the last step: all use the same
        buffers, and a step may be left in flight when a call returns."""
        current = self._current_stream()
        if current is not None and self._last_stream is not None and current != self._last_stream:
            current.wait_stream(self._last_stream)
        self._last_stream = current

    def _launch(self, scheduled: SchedulerOutput) -> LaunchedStep:
        for sequence in scheduled.admitted:
            self._set_sampling(sequence)
        sampled, assumed = scheduled.sampled, scheduled.assumed  # before tokens are in flight
        restricted = [(one.row, one.grammar) for one in sampled if one.grammar is not None]
        if restricted:
            rows = [row for row, _ in restricted if row is not None]
            self.states.set_allowed(rows, [grammar.allowed_tokens() for _, grammar in restricted])
        num_prefill_tokens = sum(chunk.count for chunk in scheduled.prefills)
        num_prefills = len(scheduled.prefills)
        shape = StepShape(len(scheduled.decodes), num_prefills, num_prefill_tokens)
        if self.padded:  # a draft needs room for more logits than sequences
            num_logits = sum(chunk.num_logits + len(chunk.scored) for chunk in scheduled.prefills)
            shape = self.shapes.find(len(scheduled.decodes), max(num_prefills, num_logits), num_prefill_tokens)
        if self.use_graphs:
            if shape not in self._graphs:
                self._prepare_shape(shape)
            self._prepare(scheduled, sampled, shape)
            made = self._graphs[shape]
            made.graph.replay()
            output = made.output
        else:
            output = self._prepare(scheduled, sampled, shape)()
        for sequence in sampled:
            sequence.has_sampled = True
            sequence.num_in_flight += 1
        scored = [
            (chunk.sequence, position, chunk.sequence.token_ids[position + 1])
            for chunk in scheduled.prefills
            for position in chunk.scored
        ]
        return replace(self._copy_to_host(output, sampled, scored), assumed=assumed, scored=scored)

    def _set_sampling(self, sequence: Sequence) -> None:
        """Sets the sampling parameters of a sequence's row."""
        assert sequence.row is not None
        params, prompt = sequence.params, sequence.num_prompt_tokens
        self.settings.set(sequence.row, params, sequence.seed)
        stop_ids = list(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids += self.model.config.eos_token_ids
        tokens = (sequence.token_ids[:prompt], sequence.token_ids[prompt:])
        self.states.set(sequence.row, params, stop_ids, *tokens)

    def _prepare_shape(self, shape: StepShape) -> None:
        """Compiles the kernels of a shape, and captures it if it can be."""
        compute = self._prepare(SchedulerOutput(), [], shape)
        if self.use_graphs:
            with _without_gc():
                self._graphs[shape] = self._capture(compute)
            build_counter.note("captured")
        else:
            compute()

    def _capture(self, compute: Callable[[], SamplerOutput]) -> StepGraph:
        """Captures a step that consists of padding, which changes no block and no row."""
        stream, current = self._stream, torch.cuda.current_stream(self.device)
        assert stream is not None
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            compute()  # compiles kernels, and makes tables and workspaces, which a capture must not
        current.wait_stream(stream)
        # As torch.cuda.graph does, but for emptying the allocators' caches: the next shape would fill them again.
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = compute()
            finally:
                graph.capture_end()
        # The logits are read right after a replay, or not at all. Graphs share their memory, so it is not kept.
        logits = torch.as_tensor(_DeviceMemory(output.logits), device=self.device)
        return StepGraph(graph, SamplerOutput(output.token_ids, logits))

    def _prepare(
        self, scheduled: SchedulerOutput, sampled: list[Sequence], shape: StepShape
    ) -> Callable[[], SamplerOutput]:
        """Fills the inputs of a step, padded to the shape; the returned function computes it."""
        num_decodes, num_logits = len(scheduled.decodes), self._num_logits(shape, scheduled, sampled)
        arrays, rows = self._buffers.next_arrays(), _rows(sampled)
        arrays["rows"][: rows.size] = rows
        arrays["rows"][rows.size : num_logits] = self._padding_row
        arrays["decode_rows"][:num_decodes] = rows[:num_decodes]
        arrays["decode_rows"][num_decodes : shape.num_decodes] = self._padding_row
        known = [len(one.token_ids) + one.num_in_flight - one.num_prompt_tokens for one in sampled]
        token_indices = np.array(known, dtype=np.int64)
        self.settings.write(arrays, rows, token_indices, num_logits)
        counts = self._write_prefills(arrays, scheduled, shape, num_logits)
        tensors = self._buffers.copy_to_device(shape.num_prefill_tokens)
        all_rows = _rows(scheduled.sequences)
        step = self._batch_tensors.fill(
            all_rows, counts, pad=(shape.num_seqs, shape.num_tokens), decodes=(num_decodes, shape.num_decodes)
        )
        if not self.padded and self.device.type == "cpu":  # the host reads whole page tables there
            used = max(1, int(self.cache.page_counts[all_rows].max()))
            step = step._replace(page_table=step.page_table[:, :used])
        return lambda: self._compute(shape, num_logits, step, tensors)

    def _num_logits(self, shape: StepShape, scheduled: SchedulerOutput, sampled: list[Sequence]) -> int:
        if self.padded:
            return self.shapes.num_logits(shape)
        return len(sampled) + sum(len(chunk.scored) for chunk in scheduled.prefills)

    def _write_prefills(
        self, arrays: dict[str, np.ndarray], scheduled: SchedulerOutput, shape: StepShape, num_logits: int
    ) -> np.ndarray:
        """Writes the prompts' tokens and where logits are wanted; returns the tokens of each sequence.

        Logits that prompts are scored by come after those that are sampled from; the sampler takes them for padding.
        """
        prefills, num_decodes = scheduled.prefills, len(scheduled.decodes)
        sizes = np.array([chunk.count for chunk in prefills], dtype=np.int64)
        indices = arrays["logits_indices"]
        indices[:num_decodes] = np.arange(num_decodes)
        start, filled = 0, num_decodes
        scored: list[int] = []
        for chunk in prefills:
            arrays["input_ids"][start : start + chunk.count] = chunk.token_ids
            scored += [shape.num_decodes + start + position - chunk.start for position in chunk.scored]
            start += chunk.count
            wanted = chunk.num_logits
            indices[filled : filled + wanted] = shape.num_decodes + np.arange(start - wanted, start)
            filled += wanted
        arrays["input_ids"][start : shape.num_prefill_tokens] = 0
        indices[filled : filled + len(scored)] = scored
        indices[filled + len(scored) : num_logits] = 0
        return np.concatenate((np.ones(num_decodes, dtype=np.int64), sizes))

    def _compute(self, shape: StepShape, num_logits: int, step: Step, tensors: dict[str, Tensor]) -> SamplerOutput:
        """Computes logits and samples a token for each row, which is kept for the next step."""
        rows, logits_indices = tensors["rows"][:num_logits], None
        input_ids = self._last_token_ids[tensors["decode_rows"][: shape.num_decodes]]
        if shape.num_prefill_tokens:
            input_ids = torch.cat((input_ids, tensors["input_ids"][: shape.num_prefill_tokens]))
            logits_indices = tensors["logits_indices"][:num_logits]
        model_input = ModelInput(input_ids, step, shape.num_decodes, logits_indices, self._enforce_eager)
        logits = self.model.forward(model_input, self.storage.layers).contiguous()
        output = sample(logits, self._sampling_settings(num_logits, tensors), self.states, rows)
        self._last_token_ids[rows] = output.token_ids.clamp(min=0)  # the next step reads it, valid or not
        return output

    def _sampling_settings(self, num_logits: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sampler's settings for so many rows: views of `tensors`, which are always the same."""
        if num_logits not in self._settings_views:
            given = {name: tensors[name][: num_logits * width] for name, (_, width) in FIELDS.items()}
            given["penalties"] = given["penalties"].view(num_logits, 3)
            self._settings_views[num_logits] = given
        return self._settings_views[num_logits]

    def _copy_to_host(
        self, output: SamplerOutput, sampled: list[Sequence], scored: list[tuple[Sequence, int, int]]
    ) -> LaunchedStep:
        """Starts the copy of the sampled tokens to the host, with log probabilities for those that ask."""
        results = [output.token_ids[: len(sampled)]]
        asked = self.settings.num_logprobs[_rows(sampled)]
        indices = np.nonzero(asked >= 0)[0]
        if indices.size:
            on_device = self.states.to_device(indices)
            results += logprobs_of(output, on_device, int(asked.max()))
        count = len(results)
        if scored:
            most = max(one.params.prompt_logprobs or 0 for one, _, _ in scored)
            rows = self.states.to_device(np.arange(len(sampled), len(sampled) + len(scored)))
            wanted = self.states.to_device(np.array([token for _, _, token in scored], dtype=np.int64))
            results += logprobs_of(output, rows, most, wanted)
        if self.device.type != "cuda":
            return LaunchedStep(sampled, results[:count], None, indices.tolist(), scores=results[count:])
        hosts = [torch.empty(result.shape, dtype=result.dtype, pin_memory=True, device="cpu") for result in results]
        for host, result in zip(hosts, results):
            host.copy_(result, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return LaunchedStep(sampled, hosts[:count], done, indices.tolist(), scores=hosts[count:])


class _DeviceMemory:
    """The memory of a float32 tensor, without keeping it from being used for others."""

    def __init__(self, x: Tensor) -> None:
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape), "typestr": "<f4", "data": (x.data_ptr(), False), "strides": None, "version": 3,
        }  # fmt: skip


class _OnDevice:
    """Inference mode, with the runner's GPU as the current one."""

    def __init__(self, device: torch.device) -> None:
        self._contexts = (
            torch.inference_mode(),
            torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        )

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)  # type: ignore[arg-type]


@contextmanager
def _without_gc() -> Iterator[None]:
    """No garbage collection inside: among what it frees may be what a capture forbids."""
    enabled = gc.isenabled()
    if enabled:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _rows(sequences: list[Sequence]) -> np.ndarray:
    return np.array([one.row for one in sequences], dtype=np.int64)
