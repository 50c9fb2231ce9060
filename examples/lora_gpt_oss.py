"""LoRA on the attention and the router of gpt-oss, on packed sequences; its experts stay in MXFP4."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import parametrize

import flashkernel.hf
from flashkernel.engine import hub

ROOT = Path(__file__).resolve().parent.parent
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass
class Run:
    """What a training run left: a loss and a duration for each step, and the most memory it held."""

    tokens: int
    parameters: int
    loaded_bytes: int = 0
    peak_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
        """Trains one step."""
        began = time.perf_counter()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(float(loss.detach()))  # waits for the device, so the clock may be read
        self.seconds.append(time.perf_counter() - began)

    def middle_seconds(self) -> float:
        """The median step, without the first."""
        later = self.seconds[1:]
        return sorted(later or self.seconds)[len(later) // 2]


class LoraLinear(nn.Module):
    """layer(x) + scale * B A x, with a frozen layer."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer, self.scale = layer, 2.0
        where: Any = {"device": layer.weight.device, "dtype": torch.float32}
        self.down = nn.Parameter(torch.randn(rank, layer.in_features, **where) / math.sqrt(layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank, **where))

    def forward(self, x: Tensor) -> Tensor:
        adapted = F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))
        return torch.add(self.layer(x), adapted, alpha=self.scale)


class LoraWeight(nn.Module):
    """weight + scale * B A, for a module that reads its weight itself, as gpt-oss's router does."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.scale = 2.0
        self.down = nn.Parameter(torch.randn(rank, columns, device=weight.device) / math.sqrt(columns))
        self.up = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.scale * self.up @ self.down).to(weight.dtype)


def add_adapters(model: Any, rank: int) -> list[nn.Parameter]:
    """Puts adapters on the projections of attention and on the routers; returns their parameters."""
    for layer in model.model.layers:
        for name in PROJECTIONS:
            setattr(layer.self_attn, name, LoraLinear(getattr(layer.self_attn, name), rank))
        router = layer.mlp.router
        parametrize.register_parametrization(router, "weight", LoraWeight(router.weight, rank))
    return [one for one in model.parameters() if one.requires_grad]


def documents(folder: str | Path) -> list[list[int]]:
    """The project's documents as token ids, by the model's tokenizer; as bytes without one."""
    texts = [path.read_text() for path in sorted(ROOT.rglob("*.md")) if ".venv" not in path.parts]
    file = (hub.resolve(folder) if hub.is_repository(folder) else Path(folder)) / "tokenizer.json"
    if not file.is_file():
        return [list(text.encode()) for text in texts]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return [tokenizer.encode(text).ids for text in texts]


def packed(texts: list[list[int]], length: int, generator: torch.Generator, device: torch.device) -> dict[str, Any]:
    """A batch of `length` tokens, made of pieces of documents that do not see each other."""
    tokens: list[int] = []
    starts = [0]
    while len(tokens) < length:
        text = texts[int(torch.randint(0, len(texts), (1,), generator=generator))]
        most = min(len(text), length - len(tokens), max(16, length // 4))
        first = int(torch.randint(0, len(text) - most + 1, (1,), generator=generator))
        tokens += text[first : first + most]
        starts.append(len(tokens))
    lengths = [after - before for before, after in pairwise(starts)]
    positions = torch.cat([torch.arange(one) for one in lengths])
    bounds = torch.tensor(starts, dtype=torch.int32, device=device)
    ids = torch.tensor(tokens, device=device)
    labels = torch.where(positions.to(device) == 0, -100, ids)  # no document predicts the first token of the next
    return {
        "input_ids": ids[None], "labels": labels[None], "position_ids": positions[None].to(device),
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": max(lengths), "max_length_k": max(lengths),
    }  # fmt: skip


def train(folder: str | Path, rank: int, steps: int, length: int, device: torch.device) -> Run:
    """Trains the adapters; the model's own weights do not change."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = flashkernel.hf.load_gpt_oss(folder, device, dtype)
    parameters = add_adapters(model, rank)
    flashkernel.hf.patch(model)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    texts = documents(folder)
    limit = model.config.vocab_size
    texts = [[one for one in text if one < limit] for text in texts]
    run = Run(length, sum(one.numel() for one in parameters))
    if device.type == "cuda":
        run.loaded_bytes = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    generator = torch.Generator().manual_seed(1)
    for _ in track(range(steps), description="LoRA"):
        run.step(model, optimizer, packed(texts, length, generator, device))
    if device.type == "cuda":
        run.peak_bytes = torch.cuda.max_memory_allocated(device)
    return run


def report(run: Run) -> Table:
    """Loss, speed and memory."""
    table = Table("trained parameters", "first loss", "last loss", "tokens/s", "model", "peak memory")
    memory = [f"{one / 1e9:.2f} GB" if one else "not measured on a CPU" for one in (run.loaded_bytes, run.peak_bytes)]
    rate = f"{run.tokens / run.middle_seconds():,.0f}"
    table.add_row(f"{run.parameters:,}", f"{run.losses[0]:.4f}", f"{run.losses[-1]:.4f}", rate, *memory)
    return table
