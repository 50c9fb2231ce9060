"""One decoder layer after another over whole sequences, with the inputs of its projections recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashkernel as fk
from flashkernel.blocks.fp8 import expand_scales
from flashkernel.blocks.integers import INT4, integer_scales, round_to_integers
from flashkernel.engine.forward_pass import ForwardPass
from flashkernel.engine.transformer import PROJECTIONS, LayerWeights, ModelInput, Transformer
from flashkernel.kvcache import BatchTensors, KVCache, LayerPages, PageStorage
from flashkernel.quantization.scheme import storable_scales

PAGE = 64
KV_GROUP = 32  # columns of a head that share a scale in int4
# Formats of keys and values -> bits of an element, scales included (a float32 scale for 64 columns; in int4 a float16
# scale and a zero point of a byte for 32 columns).
KV_CACHES = {"float8_e4m3fn": 8.5, "int8": 8.5, "int4": 4.75}
SAMPLE = 256  # inputs of each projection that are kept, for the error after quantization
_linear: Any = fk.linear
_layer_norm: Any = fk.layer_norm


class InputStatistics:
    """What calibration needs of a projection's inputs.

    Attributes:
        hessian: Sum of x x^T, float32 (in, in).
        count: Tokens.
        mean_magnitudes: mean |x| of each channel.
        largest: max |x| of each channel.
        sample: Some inputs, (rows, in).
    """

    def __init__(self) -> None:
        self.hessian: Tensor | None = None
        self.count = 0
        self._sums: Tensor | None = None
        self.largest: Tensor | None = None
        self._samples: list[Tensor] = []

    def add(self, inputs: Tensor) -> None:
        """Adds inputs (tokens, in)."""
        x = inputs.detach().float()
        product, sums, largest = x.T @ x, x.abs().sum(0), x.abs().amax(0)
        self.hessian = product if self.hessian is None else self.hessian + product
        self._sums = sums if self._sums is None else self._sums + sums
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self.count += x.shape[0]
        self._samples.append(x[:: max(1, x.shape[0] // 64)][:64].clone())

    @property
    def mean_magnitudes(self) -> Tensor:
        assert self._sums is not None
        return self._sums / self.count

    @property
    def sample(self) -> Tensor:
        return torch.cat(self._samples)[:: max(1, 64 * len(self._samples) // SAMPLE)]


def round_to_int4(values: Tensor) -> Tensor:
    """Keys or values (tokens, heads, dim) rounded to 4 bits, with a scale and a zero point for each 32 columns of a
    head, or for the whole head where 32 does not divide it."""
    dim = values.shape[-1]
    group = (1, KV_GROUP if dim % KV_GROUP == 0 else dim)
    flat = values.reshape(-1, dim)
    scales, zeros = integer_scales(flat, group, INT4, False)
    scales = storable_scales(scales)  # as a cache would store them
    codes = round_to_integers(flat, scales, zeros, group, INT4)
    assert zeros is not None
    steps = codes.float() - expand_scales(zeros.float(), group, flat.shape)
    return (steps * expand_scales(scales, group, flat.shape)).view_as(values).to(values.dtype)


class RecordingPass(ForwardPass):
    """A pass that gives the inputs of every projection of one layer to `statistics`, by the projection's name."""

    layer: LayerWeights
    statistics: dict[str, InputStatistics] | None = None
    round_kv: Callable[[Tensor], Tensor] | None = None  # applied to keys, after rotation, and values

    def attention(self, q: Tensor, pages: LayerPages, window: int | None, sinks: Tensor | None) -> Tensor:
        if self.round_kv is not None:
            slots = self.model_input.step.slots.long()
            for stored in (pages.k_pages.flatten(0, 1), pages.v_pages.flatten(0, 1)):
                stored[slots] = self.round_kv(stored[slots])
        return super().attention(q, pages, window, sinks)

    def _record(self, weight: Any, inputs: Tensor) -> None:
        if self.statistics is None:
            return
        for name in PROJECTIONS:
            if getattr(self.layer, name) is weight:
                self.statistics.setdefault(name, InputStatistics()).add(inputs)

    def mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        return super().mlp(x, layer) if layer.router is not None else self.mlp_by_linear(x, layer)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        self._record(weight, x)
        return _linear(x, weight, bias)

    def linear_residual(self, x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor) -> Tensor:
        self._record(weight, x)
        return _linear(x, weight, bias, residual)

    def norm_linear(
        self, x: Tensor, norm: Tensor, norm_bias: Tensor | None, weight: Any, bias: Tensor | None, **options: Any
    ) -> Tensor:
        if isinstance(weight, tuple):
            return super().norm_linear(x, norm, norm_bias, weight, bias, **options)
        h = _layer_norm(x, norm, norm_bias, eps=self.config.eps) if self.config.norm == "layer" else self.norm(x, norm)
        self._record(weight, h)
        return _linear(h, weight, bias, **options)


class SequenceRunner:
    """Runs layers of a model over sequences of one length.

    Args:
        model: The model; its embedding and head are used.
        token_ids: int64 (sequences, length).
        batch: Sequences computed together.
        kv_cache: Format of keys and values: "float8_e4m3fn" or "int8" as the engine's cache stores them, with a scale
            for each head of a token, or "int4": rounded to 4 bits with a scale and a zero point for each 32 columns of
            a head, and kept as floats. None: the model's dtype.
    """

    def __init__(self, model: Transformer, token_ids: Tensor, batch: int = 4, kv_cache: str | None = None) -> None:
        longest = model.config.max_position_embeddings
        if token_ids.ndim != 2 or not 0 < token_ids.shape[1] <= longest:
            raise ValueError(
                f"token_ids have the shape {tuple(token_ids.shape)}; they must be (sequences, length) with up to "
                f"{longest} tokens, the model's context"
            )
        least, most = (int(one) for one in token_ids.aminmax()) if token_ids.numel() else (-1, -1)
        if token_ids.dtype != torch.int64 or least < 0 or most >= model.config.vocab_size:
            raise ValueError(
                f"token_ids are {token_ids.numel()} of {token_ids.dtype} from {least} to {most}; they must be int64, "
                f"at least one sequence, and tokens of the model's vocabulary, from 0 to {model.config.vocab_size - 1}"
            )
        self.model, self.token_ids, self.batch = model, token_ids.to(model.device), batch
        length, config = token_ids.shape[1], model.config
        pages = batch * -(-length // PAGE) + 1
        if kv_cache not in (None, *KV_CACHES):
            raise ValueError(f"kv_cache is {kv_cache!r}; it must be one of {', '.join(KV_CACHES)}, or None")
        self._round_kv = round_to_int4 if kv_cache == "int4" else None
        dtype = model.dtype if kv_cache in (None, "int4") else getattr(torch, str(kv_cache))
        self._storage = PageStorage(1, pages, PAGE, config.kv_heads, config.head_dim, dtype=dtype,
                                    device=model.device)  # fmt: skip
        self._inputs: dict[int, ModelInput] = {}

    def embeddings(self) -> Tensor:
        """The hidden states before the first layer, (sequences, length, hidden)."""
        weights = self.model.weights
        x = self.model.embed(self.token_ids)
        if weights.position_embedding is not None:
            x = x + weights.position_embedding[: self.token_ids.shape[1]]
        return x

    def layer(
        self, hidden: Tensor, layer: LayerWeights, index: int, statistics: dict[str, InputStatistics] | None = None
    ) -> Tensor:
        """The hidden states (sequences, length, hidden) after a layer; `statistics` takes its projections' inputs."""
        outputs = []
        for first, run in self._passes():
            run.layer, run.statistics = layer, statistics
            x = hidden[first : first + self.batch]
            y = self.model.forward_layer(run, x.flatten(0, 1), layer, index, self._storage.layers[0])
            outputs.append(y.view_as(x))
        return torch.cat(outputs)

    def losses(self, hidden: Tensor) -> Tensor:
        """Cross entropy of each next token, float32 (sequences, length - 1)."""
        found = []
        for number, x in enumerate(hidden):
            run = RecordingPass(self.model.config, self._input(1))
            logits = self.model.logits(run, x)
            found.append(F.cross_entropy(logits[:-1], self.token_ids[number, 1:], reduction="none"))
        return torch.stack(found)

    def _passes(self) -> Iterator[tuple[int, RecordingPass]]:
        for first in range(0, self.token_ids.shape[0], self.batch):
            count = min(self.batch, self.token_ids.shape[0] - first)
            run = RecordingPass(self.model.config, self._input(count))
            run.round_kv = self._round_kv
            yield first, run

    def _input(self, sequences: int) -> ModelInput:
        """The input of a pass over so many sequences; it is always the same but for the tokens."""
        if sequences not in self._inputs:
            length = self.token_ids.shape[1]
            cache = KVCache(self._storage.pages, PAGE, max_num_seqs=sequences, max_model_len=-(-length // PAGE) * PAGE)
            rows = [cache.add() for _ in range(sequences)]
            cache.grow(rows, length)
            step = BatchTensors(cache, sequences, sequences * length, self.model.device).fill(rows, length)
            ids = self.token_ids[:sequences].flatten()
            self._inputs[sequences] = ModelInput(ids, step, 0, None)
        return self._inputs[sequences]
