"""Runs steps on the device: fills the buffers, computes logits, draws tokens, brings them back.

Decoding steps on a GPU are CUDA graphs, one for each batch size of a ladder and each sampling plan, captured when first
needed; steps of a few prompts alone are graphs too, from their size's second time on. Everything they read lies at
fixed addresses. The token that a sequence decodes next is taken from where the last step put it, so a step can be
launched before the host has seen the tokens of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flashkernel.engine.sampler import FIELDS, Plan, RowSettings, Sampled, TokenCounts, sample
from flashkernel.engine.scheduler import Batch
from flashkernel.engine.sequence import Logprob, Sequence
from flashkernel.engine.staging import Staging
from flashkernel.engine.transformer import Tokens, Transformer
from flashkernel.kvcache import BatchTensors, KVCache, PageStorage

WARM_UPS = 2  # runs before a capture, in which kernels are compiled and workspaces made
PROMPT_SEQUENCES = 8  # prompts that a graph takes at once; more tokens keep the GPU busy longer than the host


def ladder(most: int) -> list[int]:
    """Batch sizes that graphs are captured for; a batch runs padded to the next one."""
    sizes = [1, 2, 4, 8, *range(16, 65, 16), *range(96, 257, 32), *range(320, 4097, 64)]
    return sorted({size for size in sizes if size < most} | {most})


def prompt_ladder(most: int) -> list[int]:
    """Numbers of prompt tokens that graphs are captured for."""
    sizes = [*range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256)]
    return [size for size in sizes if size <= most]


@dataclass(frozen=True)
class Graph:
    """What a CUDA graph is captured for: a step of prompts or of decoding sequences, padded to these sizes."""

    prompts: bool
    sequences: int
    tokens: int
    plan: Plan


@dataclass
class Launched:
    """A step on its way; `read` waits for its tokens."""

    sequences: list[Sequence]
    results: list[Tensor]  # on the host once `done` has passed: tokens, then logprobs where asked for
    done: torch.cuda.Event | None

    def read(self) -> tuple[list[int], list[Logprob] | None]:
        if self.done is not None:
            self.done.synchronize()
        values = [result.tolist() for result in self.results]
        tokens = values[0]
        if len(values) == 1:
            return tokens, None
        chosen, top, names = values[1:]
        return tokens, [
            Logprob(token, log, tuple(zip(name, logs))) for token, log, logs, name in zip(tokens, chosen, top, names)
        ]


class Runner:
    """A transformer, its pages, and the buffers between host and device."""

    def __init__(
        self,
        model: Transformer,
        storage: PageStorage,
        cache: KVCache,
        most_sequences: int,
        most_tokens: int,
        graphs: bool,
    ) -> None:
        self.model, self.storage, self.cache, self.device = model, storage, cache, model.device
        self.graphs = graphs and self.device.type == "cuda"
        self.settings = RowSettings(most_sequences)
        self._nobody = most_sequences  # a row for padding
        self._tensors = BatchTensors(cache, most_sequences, most_tokens, self.device)
        small = {"rows": torch.int64, "wanted": torch.int64, **FIELDS}
        fields = {name: (dtype, most_sequences) for name, dtype in small.items()}
        self._staging = Staging({**fields, "ids": (torch.int64, most_tokens)}, self.device)
        self._last_tokens = torch.zeros(most_sequences + 1, dtype=torch.int64, device=self.device)
        self._counts: TokenCounts | None = None
        self._ladder = ladder(most_sequences)
        self._prompt_ladder = prompt_ladder(most_tokens) if model.config.experts == 0 else []  # those ask the host
        self._captured: dict[Graph, tuple[torch.cuda.CUDAGraph, Sampled]] = {}
        self._met: set[Graph] = set()  # sizes of prompts that came once
        # One stream for all captures: kernels that keep counters keep a row of them for each stream.
        self._stream = torch.cuda.Stream(self.device) if self.graphs else None
        self._pool = torch.cuda.graph_pool_handle() if self.graphs else None

    def launch(self, batch: Batch) -> Launched:
        """Put a step on its way. Tokens are drawn for `batch.drawing`."""
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with torch.inference_mode(), on_device:
            return self._launch(batch)

    def _launch(self, batch: Batch) -> Launched:
        for sequence in batch.admitted:
            self._begin(sequence)
        drawing = batch.drawing
        plan = self.settings.plan(np.array([one.row for one in drawing], dtype=np.int64))
        graph = self._graph(batch, plan)
        if graph is None:
            compute = self._send_prompts(batch, drawing, plan)
            sampled = compute()
        else:
            sampled = self._replay(graph, batch, drawing, plan)
        for sequence in drawing:
            sequence.drawn = True
            sequence.in_flight += 1
        return self._bring_back(sampled, drawing)

    def _begin(self, sequence: Sequence) -> None:
        """A row has a new sequence, with its settings."""
        assert sequence.row is not None
        self.settings.set(sequence.row, sequence.params, sequence.seed)
        if sequence.params.penalised:
            if self._counts is None:
                self._counts = TokenCounts(self._nobody + 1, self.model.config.vocab, self.device)
            prompt = sequence.prompt_length
            self._counts.set(sequence.row, sequence.tokens[:prompt], sequence.tokens[prompt:])

    def _graph(self, batch: Batch, plan: Plan) -> Graph | None:
        """The graph that serves a step; None where it must be launched kernel by kernel."""
        if not self.graphs:
            return None
        if not batch.chunks:
            size = next(step for step in self._ladder if step >= len(batch.decoding))
            return Graph(False, size, size, plan)
        tokens = next((size for size in self._prompt_ladder if size >= batch.tokens), None)
        if batch.decoding or len(batch.chunks) > PROMPT_SEQUENCES or tokens is None:
            return None
        graph = Graph(True, next(step for step in self._ladder if step >= len(batch.chunks)), tokens, plan)
        known = graph in self._met
        self._met.add(graph)
        return graph if known else None

    def _replay(self, graph: Graph, batch: Batch, drawing: list[Sequence], plan: Plan) -> Sampled:
        send = self._send_prompts if graph.prompts else self._send_decoding
        if graph not in self._captured:
            self._captured[graph] = self._capture(send(Batch(), [], plan, graph), plan)
        send(batch, drawing, plan, graph)
        captured, sampled = self._captured[graph]
        captured.replay()
        return sampled

    def _capture(self, compute: Callable[[], Sampled], plan: Plan) -> tuple[torch.cuda.CUDAGraph, Sampled]:
        """Capture a step that has padding alone, which leaves no trace in pages or rows."""
        if plan.penalised and self._counts is None:
            self._counts = TokenCounts(self._nobody + 1, self.model.config.vocab, self.device)
        stream, current = self._stream, torch.cuda.current_stream(self.device)
        assert stream is not None
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                compute()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            sampled = compute()
        return graph, sampled

    def _send_decoding(self, batch: Batch, drawing: list[Sequence], plan: Plan, graph: Graph) -> Callable[[], Sampled]:
        """Fill the buffers for a decoding step, padded to the graph's size; what is returned computes it."""
        self._write(drawing, plan, graph.sequences)
        sent = self._staging.send(0)
        rows = sent["rows"][: graph.sequences]
        own = np.array([one.row for one in drawing], dtype=np.int64)
        step = self._tensors.fill(own, pad=(graph.sequences, graph.tokens))
        return lambda: self._draw(Tokens(self._last_tokens[rows], step, graph.tokens, None), sent, rows, plan)

    def _send_prompts(
        self, batch: Batch, drawing: list[Sequence], plan: Plan, graph: Graph | None = None
    ) -> Callable[[], Sampled]:
        """The same for a step that may have prompts in it, without a graph as large as it is."""
        decoding = len(batch.decoding)
        counts = np.array([1] * decoding + [chunk.count for chunk in batch.chunks], dtype=np.int64)
        drawn, tokens = (graph.sequences, graph.tokens) if graph else (len(drawing), batch.tokens)
        arrays = self._write(drawing, plan, drawn)
        last = np.array([True] * decoding + [chunk.last for chunk in batch.chunks], dtype=bool)
        arrays["wanted"][: len(drawing)] = (np.cumsum(counts) - 1)[last]
        arrays["wanted"][len(drawing) : drawn] = 0
        place = decoding
        for chunk in batch.chunks:
            arrays["ids"][place : place + chunk.count] = chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
            place += chunk.count
        arrays["ids"][place:tokens] = 0
        sent = self._staging.send(tokens)
        rows_of = np.array([one.row for one in batch.sequences], dtype=np.int64)
        step = self._tensors.fill(rows_of, counts, pad=(drawn, tokens) if graph else None)
        if self.device.type == "cpu" and graph is None:  # the host reads whole page tables there
            used = max(1, int(self.cache.page_counts[rows_of].max()))
            step = step._replace(page_table=step.page_table[:, :used])
        ids, rows = sent["ids"][:tokens], sent["rows"][:drawn]
        if decoding:
            ids[:decoding] = self._last_tokens[rows[:decoding]]
        wanted = None if drawn == tokens else sent["wanted"][:drawn]
        return lambda: self._draw(Tokens(ids, step, decoding, wanted), sent, rows, plan)

    def _draw(self, tokens: Tokens, sent: dict[str, Tensor], rows: Tensor, plan: Plan) -> Sampled:
        """Logits of the last tokens, and a token for each row, which is kept for the next step."""
        logits = self.model.forward(tokens, self.storage.layers)
        settings = {name: sent[name][: rows.shape[0]] for name in FIELDS}
        sampled = sample(logits, settings, plan, rows, self._counts)
        self._last_tokens[rows] = sampled.tokens.clamp(min=0)  # a step launched ahead reads it, valid or not
        return sampled

    def _write(self, drawing: list[Sequence], plan: Plan, size: int) -> dict[str, np.ndarray]:
        """Rows and settings of the sequences that get a token, padded to `size`."""
        arrays, count = self._staging.begin(), len(drawing)
        rows = np.array([one.row for one in drawing], dtype=np.int64)
        arrays["rows"][:count] = rows
        arrays["rows"][count:size] = self._nobody
        if plan.random or plan.penalised:
            numbers = np.array([one.total - one.prompt_length for one in drawing], dtype=np.int64)
            self.settings.write(arrays, rows, numbers)
            for name in FIELDS:
                arrays[name][count:size] = 1
        return arrays

    def _bring_back(self, sampled: Sampled, drawing: list[Sequence]) -> Launched:
        """Start the copy of what was drawn to the host."""
        given = [result for result in sampled if result is not None]
        results = [result[: len(drawing)] for result in given]
        if self.device.type != "cuda":
            return Launched(drawing, results, None)
        hosts = [torch.empty(result.shape, dtype=result.dtype, pin_memory=True) for result in results]
        for host, result in zip(hosts, results):
            host.copy_(result, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Launched(drawing, hosts, done)
