"""Train a small mixture of experts with each router and each balance term, and compare loss, utilization and speed.

All runs start from the same weights and see the same batches: this project's own documents, byte by byte.

    python examples/moe_study.py                      # on a GPU: 4 layers, 16 experts, 300 steps
    python examples/moe_study.py --tiny               # on a CPU: 2 layers, 8 experts, 30 steps, about a minute
    python examples/moe_study.py --only softmax+cv sigmoid+bias
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import flashkernel as fk

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Variant:
    """A router and what balances it: options of `MoE`, and the loss that is added with its factor."""

    name: str
    options: dict[str, Any]
    loss: str = ""
    factor: float = 0.0


def variants(k: int) -> list[Variant]:
    softmax = {"router": fk.Router("softmax", k)}
    return [
        Variant("softmax", softmax),
        Variant("softmax+switch", softmax, "switch", 0.01),
        Variant("softmax+cv", softmax, "cv", 0.01),
        Variant("softmax+z", softmax, "z", 0.001),
        Variant("softmax+capacity", {**softmax, "capacity_factor": 1.25}, "switch", 0.01),
        Variant("noisy", {**softmax, "noisy": True}, "cv", 0.01),
        Variant("sigmoid", {"router": fk.Router("sigmoid", k)}),
        Variant("sigmoid+bias", {"router": fk.Router("sigmoid", k), "balance_rate": 0.01}),
        Variant("dynamic", {"router": fk.Router("dynamic", 2 * k, mass=0.5)}, "switch", 0.01),
        Variant("expert choice (leaks)", {"router": fk.Router("expert_choice", k)}),
        Variant("hash", {"router": fk.Router("hash", k)}),
        Variant("random", {"router": fk.Router("random", k)}),
    ]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of a batch."""

    layers: int
    hidden: int
    inner: int
    experts: int
    k: int
    batch: int
    length: int


TINY = Sizes(layers=2, hidden=64, inner=64, experts=8, k=2, batch=2, length=64)
LARGE = Sizes(layers=4, hidden=512, inner=512, experts=16, k=2, batch=16, length=512)


@dataclass
class Run:
    """What a run left: losses, seconds of each step, and how experts were used."""

    usage: fk.ExpertUsage
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MoE(norm(x))."""

    def __init__(self, sizes: Sizes, options: dict[str, Any]) -> None:
        super().__init__()
        self.heads = sizes.hidden // 32
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.hidden) for _ in range(2))
        self.moe = fk.MoE(sizes.hidden, sizes.inner, sizes.experts, **options)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, 32)).unbind(2)
        attended: Any = fk.attention(q, k, v, mask=fk.causal())
        x = x + self.out(attended.flatten(2))
        return x + self.moe(self.norms[1](x), token_ids=tokens)


class Model(nn.Module):
    """A byte-level language model of such blocks."""

    def __init__(self, sizes: Sizes, options: dict[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, sizes.hidden)
        self.positions = nn.Parameter(torch.randn(sizes.length, sizes.hidden) * 0.02)
        self.blocks = nn.ModuleList(Block(sizes, options) for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.hidden, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x, tokens)
        return self.head(x)


def corpus() -> Tensor:
    """The project's documents as bytes."""
    paths = sorted(path for path in ROOT.rglob("*.md") if ".venv" not in path.parts)
    return torch.tensor(list("\n\n".join(path.read_text() for path in paths).encode()), dtype=torch.long)


def train(variant: Variant, sizes: Sizes, steps: int, text: Tensor, device: torch.device) -> Run:
    """Trains a model with one variant; utilization is gathered without waiting for the device."""
    torch.manual_seed(0)
    model = Model(sizes, variant.options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    layers = [block.moe for block in model.blocks]  # type: ignore[union-attr]
    run = Run(fk.ExpertUsage(sizes.layers))
    generator = torch.Generator().manual_seed(1)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    for _ in track(range(steps), description=f"{variant.name:22}"):
        starts = torch.randint(0, len(text) - sizes.length - 1, (sizes.batch,), generator=generator)
        batch = torch.stack([text[start : start + sizes.length + 1] for start in starts.tolist()]).to(device)
        began = time.perf_counter()
        with autocast:
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        total = loss
        if variant.loss:
            total = loss + variant.factor * sum(layer.balance_loss(variant.loss) for layer in layers)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        for index, layer in enumerate(layers):
            run.usage.add(index, layer.routing)
        run.losses.append(float(loss.detach()))  # waits for the device, so the clock may be read
        run.seconds.append(time.perf_counter() - began)
    return run


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def report(runs: dict[str, Run]) -> Table:
    """Loss, utilization over the last steps, and speed."""
    table = Table("router", "loss", "min / max", "entropy", "dropped", "ms a step", title="mean of the last 10 steps")
    for name, run in runs.items():
        last = [float(run.usage.statistic(one)[-10:].mean()) for one in ("min_over_max", "entropy", "dropped")]
        loss, step = sum(run.losses[-10:]) / len(run.losses[-10:]), median(run.seconds[1:] or run.seconds) * 1e3
        table.add_row(name, f"{loss:.3f}", *(f"{value:.3f}" for value in last), f"{step:.1f}")
    return table


def plot(runs: dict[str, Run], path: Path) -> None:
    """Loss curves, utilization and speed side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(16, 5), layout="constrained")
    for name, run in runs.items():
        left.plot(run.losses, label=name, linewidth=1)
    left.set(xlabel="step", ylabel="loss", title="loss, the same batches")
    left.legend(fontsize=7)
    names = list(runs)
    middle.barh(names, [float(run.usage.statistic("min_over_max")[-10:].mean()) for run in runs.values()])
    middle.set(xlim=(0, 1), title="smallest over largest load")
    right.barh(names, [median(run.seconds[1:] or run.seconds) * 1e3 for run in runs.values()])
    right.set(title="ms a step")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--steps", type=int, help="training steps; 300, or 30 with --tiny")
    parser.add_argument("--only", nargs="+", help="names of the variants; all by default")
    parser.add_argument("--out", type=Path, default=Path("moe_study.png"), help="where the plot goes")
    parser.add_argument("--usage", type=Path, help="where a heat map of the last variant's experts goes")
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiny = chosen.tiny or device.type == "cpu"
    sizes, text = TINY if tiny else LARGE, corpus()
    wanted = [one for one in variants(sizes.k) if chosen.only is None or one.name in chosen.only]
    if not wanted:
        names = ", ".join(one.name for one in variants(sizes.k))
        parser.error(f"--only names no variant; there are {names}")
    runs = {one.name: train(one, sizes, chosen.steps or (30 if tiny else 300), text, device) for one in wanted}
    console = Console()
    console.print(report(runs))
    plot(runs, chosen.out)
    console.print(f"plot: {chosen.out}")
    if chosen.usage is not None:
        list(runs.values())[-1].usage.plot(chosen.usage)
        console.print(f"utilization of {wanted[-1].name}: {chosen.usage}")
    return runs


if __name__ == "__main__":
    main()
