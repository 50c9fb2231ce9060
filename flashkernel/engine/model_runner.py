"""The model runner: runs steps on the device. It fills the inputs, computes logits, samples, and copies tokens back.

Decoding steps on a GPU are CUDA graphs, one for each batch size of a list and each `SamplingMetadata`, captured when
first needed. Steps of a few prompts alone are graphs too, from the second time that their size comes. Everything a
graph reads is at a fixed address. The token that a sequence decodes next is read from where the last step wrote it, so
a step can be launched before the host has seen the tokens of the step before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashkernel.engine.input_buffers import InputBuffers
from flashkernel.engine.outputs import TokenLogprob
from flashkernel.engine.sampler import FIELDS, SamplerOutput, SamplingMetadata, SamplingState, TokenCounts, sample
from flashkernel.engine.scheduler import SchedulerOutput
from flashkernel.engine.sequence import Sequence
from flashkernel.engine.transformer import ModelInput, Transformer
from flashkernel.kvcache import BatchTensors, KVCache, PageStorage

WARMUP_RUNS = 2  # before a capture; they compile kernels and allocate workspaces
MAX_GRAPH_PREFILLS = 8  # prompts in a graph; with more tokens the GPU is busy for longer than the host


def decode_graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that graphs are captured for; a batch is padded to the next one."""
    sizes = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 257, 32), *range(320, 4097, 64)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


def prefill_graph_sizes(max_num_tokens: int) -> list[int]:
    """Numbers of prompt tokens that graphs are captured for."""
    sizes = [*range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256)]
    return [size for size in sizes if size <= max_num_tokens]


@dataclass(frozen=True)
class GraphKey:
    """What a CUDA graph is captured for: a prefill or decoding step, padded to these sizes."""

    is_prefill: bool
    num_seqs: int
    num_tokens: int
    metadata: SamplingMetadata


@dataclass
class LaunchedStep:
    """A step that was launched; `read` waits for its tokens."""

    sequences: list[Sequence]
    results: list[Tensor]  # on the host once `done` has passed: tokens, then log probabilities if asked for
    done: torch.cuda.Event | None

    def read(self) -> tuple[list[int], list[TokenLogprob] | None]:
        """The token of each sequence, and its log probabilities if any sequence asked for them."""
        if self.done is not None:
            self.done.synchronize()
        values = [result.tolist() for result in self.results]
        token_ids = values[0]
        if len(values) == 1:
            return token_ids, None
        return token_ids, [
            TokenLogprob(token_id, logprob, tuple(zip(top_ids, top)))
            for token_id, logprob, top, top_ids in zip(token_ids, *values[1:])
        ]


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
        self.use_graphs = not enforce_eager and self.device.type == "cuda"
        self.sampling_state = SamplingState(max_num_seqs)
        self._padding_row = max_num_seqs
        self._batch_tensors = BatchTensors(cache, max_num_seqs, max_num_batched_tokens, self.device)
        per_sequence = {"rows": torch.int64, "logits_indices": torch.int64, **FIELDS}
        fields = {name: (dtype, max_num_seqs) for name, dtype in per_sequence.items()}
        self._buffers = InputBuffers({**fields, "input_ids": (torch.int64, max_num_batched_tokens)}, self.device)
        self._last_token_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self.device)  # by row
        self._counts: TokenCounts | None = None
        self._decode_sizes = decode_graph_sizes(max_num_seqs)
        dense = model.config.num_experts == 0  # prefill of experts reads the router's choice on the host
        self._prefill_sizes = prefill_graph_sizes(max_num_batched_tokens) if dense else []
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, SamplerOutput]] = {}
        self._seen: set[GraphKey] = set()  # prefill sizes that came once
        # One stream for all captures: kernels that keep counters keep a row of them for each stream.
        self._stream = torch.cuda.Stream(self.device) if self.use_graphs else None
        self._pool = torch.cuda.graph_pool_handle() if self.use_graphs else None

    def launch(self, scheduled: SchedulerOutput) -> LaunchedStep:
        """Launches a step and samples a token for each of `scheduled.sampled`."""
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with torch.inference_mode(), on_device:
            return self._launch(scheduled)

    def _launch(self, scheduled: SchedulerOutput) -> LaunchedStep:
        for sequence in scheduled.admitted:
            self._set_sampling(sequence)
        sampled = scheduled.sampled
        metadata = self.sampling_state.metadata(_rows(sampled))
        key = self._graph_key(scheduled, metadata)
        if key is None:
            output = self._prepare_prefill(scheduled, sampled, metadata)()
        else:
            output = self._replay(key, scheduled, sampled)
        for sequence in sampled:
            sequence.has_sampled = True
            sequence.num_in_flight += 1
        return self._copy_to_host(output, sampled)

    def _set_sampling(self, sequence: Sequence) -> None:
        """Sets the sampling parameters of a sequence's row."""
        assert sequence.row is not None
        self.sampling_state.set(sequence.row, sequence.params, sequence.seed)
        if sequence.params.has_penalties:
            prompt = sequence.num_prompt_tokens
            self._token_counts().set(sequence.row, sequence.token_ids[:prompt], sequence.token_ids[prompt:])

    def _token_counts(self) -> TokenCounts:
        if self._counts is None:
            self._counts = TokenCounts(self._padding_row + 1, self.model.config.vocab_size, self.device)
        return self._counts

    def _graph_key(self, scheduled: SchedulerOutput, metadata: SamplingMetadata) -> GraphKey | None:
        """The graph of a step; None if it must be launched kernel by kernel."""
        if not self.use_graphs:
            return None
        if not scheduled.prefills:
            size = next(size for size in self._decode_sizes if size >= len(scheduled.decodes))
            return GraphKey(False, size, size, metadata)
        num_tokens = next((size for size in self._prefill_sizes if size >= scheduled.num_tokens), None)
        if scheduled.decodes or len(scheduled.prefills) > MAX_GRAPH_PREFILLS or num_tokens is None:
            return None
        num_seqs = next(size for size in self._decode_sizes if size >= len(scheduled.prefills))
        key = GraphKey(True, num_seqs, num_tokens, metadata)
        seen = key in self._seen
        self._seen.add(key)
        return key if seen else None

    def _replay(self, key: GraphKey, scheduled: SchedulerOutput, sampled: list[Sequence]) -> SamplerOutput:
        prepare = self._prepare_prefill if key.is_prefill else self._prepare_decode
        if key not in self._graphs:
            self._graphs[key] = self._capture(prepare(SchedulerOutput(), [], key.metadata, key), key.metadata)
        prepare(scheduled, sampled, key.metadata, key)
        graph, output = self._graphs[key]
        graph.replay()
        return output

    def _capture(
        self, compute: Callable[[], SamplerOutput], metadata: SamplingMetadata
    ) -> tuple[torch.cuda.CUDAGraph, SamplerOutput]:
        """Captures a step that consists of padding, which changes no block and no row."""
        if metadata.penalties:
            self._token_counts()
        stream, current = self._stream, torch.cuda.current_stream(self.device)
        assert stream is not None
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_RUNS):
                compute()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            output = compute()
        return graph, output

    def _prepare_decode(
        self, scheduled: SchedulerOutput, sampled: list[Sequence], metadata: SamplingMetadata, key: GraphKey
    ) -> Callable[[], SamplerOutput]:
        """Fills the inputs of a decoding step, padded to the graph's size; the returned function computes it."""
        self._write_sampling(sampled, metadata, key.num_seqs)
        tensors = self._buffers.copy_to_device(0)
        rows = tensors["rows"][: key.num_seqs]
        step = self._batch_tensors.fill(_rows(sampled), pad=(key.num_seqs, key.num_tokens))
        return lambda: self._compute(
            ModelInput(self._last_token_ids[rows], step, key.num_tokens, None), tensors, rows, metadata
        )

    def _prepare_prefill(
        self,
        scheduled: SchedulerOutput,
        sampled: list[Sequence],
        metadata: SamplingMetadata,
        key: GraphKey | None = None,
    ) -> Callable[[], SamplerOutput]:
        """The same for a step that has, or may have, prefill chunks; without a graph it is not padded."""
        num_decodes = len(scheduled.decodes)
        counts = np.array([1] * num_decodes + [chunk.count for chunk in scheduled.prefills], dtype=np.int64)
        num_seqs, num_tokens = (key.num_seqs, key.num_tokens) if key else (len(sampled), scheduled.num_tokens)
        arrays = self._write_sampling(sampled, metadata, num_seqs)
        is_last = np.array([True] * num_decodes + [chunk.is_last for chunk in scheduled.prefills], dtype=bool)
        arrays["logits_indices"][: len(sampled)] = (np.cumsum(counts) - 1)[is_last]
        arrays["logits_indices"][len(sampled) : num_seqs] = 0
        start = num_decodes
        for chunk in scheduled.prefills:
            chunk_ids = chunk.sequence.token_ids[chunk.start : chunk.start + chunk.count]
            arrays["input_ids"][start : start + chunk.count] = chunk_ids
            start += chunk.count
        arrays["input_ids"][start:num_tokens] = 0
        tensors = self._buffers.copy_to_device(num_tokens)
        all_rows = _rows(scheduled.sequences)
        step = self._batch_tensors.fill(all_rows, counts, pad=(num_seqs, num_tokens) if key else None)
        if self.device.type == "cpu" and key is None:  # the host reads whole page tables there
            used = max(1, int(self.cache.page_counts[all_rows].max()))
            step = step._replace(page_table=step.page_table[:, :used])
        input_ids, rows = tensors["input_ids"][:num_tokens], tensors["rows"][:num_seqs]
        if num_decodes:
            input_ids[:num_decodes] = self._last_token_ids[rows[:num_decodes]]
        logits_indices = None if num_seqs == num_tokens else tensors["logits_indices"][:num_seqs]
        return lambda: self._compute(ModelInput(input_ids, step, num_decodes, logits_indices), tensors, rows, metadata)

    def _compute(
        self, model_input: ModelInput, tensors: dict[str, Tensor], rows: Tensor, metadata: SamplingMetadata
    ) -> SamplerOutput:
        """Computes logits and samples a token for each row, which is kept for the next step."""
        logits = self.model.forward(model_input, self.storage.layers)
        params = {name: tensors[name][: rows.shape[0]] for name in FIELDS}
        output = sample(logits, params, metadata, rows, self._counts)
        self._last_token_ids[rows] = output.token_ids.clamp(min=0)  # the next step reads it, valid or not
        return output

    def _write_sampling(
        self, sampled: list[Sequence], metadata: SamplingMetadata, num_seqs: int
    ) -> dict[str, np.ndarray]:
        """Writes rows and sampling parameters of the sampled sequences, padded to `num_seqs`."""
        arrays, count = self._buffers.next_arrays(), len(sampled)
        rows = _rows(sampled)
        arrays["rows"][:count] = rows
        arrays["rows"][count:num_seqs] = self._padding_row
        if metadata.random or metadata.penalties:
            token_indices = np.array([one.num_tokens - one.num_prompt_tokens for one in sampled], dtype=np.int64)
            self.sampling_state.write(arrays, rows, token_indices)
            for name in FIELDS:
                arrays[name][count:num_seqs] = 1
        return arrays

    def _copy_to_host(self, output: SamplerOutput, sampled: list[Sequence]) -> LaunchedStep:
        """Starts the copy of the sampled tokens to the host."""
        results = [result[: len(sampled)] for result in output if result is not None]
        if self.device.type != "cuda":
            return LaunchedStep(sampled, results, None)
        hosts = [torch.empty(result.shape, dtype=result.dtype, pin_memory=True) for result in results]
        for host, result in zip(hosts, results):
            host.copy_(result, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return LaunchedStep(sampled, hosts, done)


def _rows(sequences: list[Sequence]) -> np.ndarray:
    return np.array([one.row for one in sequences], dtype=np.int64)
