"""Train a small mixture of experts with each router and each balance term, and compare loss, utilization and speed.

All runs start from the same weights and see the same batches: this project's own documents, byte by byte.

    python examples/moe_study.py                      # on a GPU: 4 layers, 16 experts, 300 steps
    python examples/moe_study.py --tiny               # on a CPU: 2 layers, 8 experts, 30 steps, about a minute
    python examples/moe_study.py --only softmax+cv sigmoid+bias
    python examples/moe_study.py --tiny --steps 300 --out docs/pictures/moe-study.svg --save results/cpu
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import flashkernel as fk
from flashkernel.core import device as devices
from flashkernel.lab import moe_study

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
    paths = sorted(path for path in ROOT.rglob("*.md") if not {".venv", "build"} & set(path.parts))
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


def summary(runs: dict[str, Run]) -> list[dict[str, Any]]:
    """For each router: all losses, utilization over the last steps, and speed."""
    return [
        {
            "router": name,
            **{
                one: round(float(run.usage.statistic(one)[-moe_study.LAST :].mean()), 4)
                for one in ("min_over_max", "entropy", "dropped")
            },
            "ms_per_step": round(median(run.seconds[1:] or run.seconds) * 1e3, 3),
            "losses": [round(loss, 4) for loss in run.losses],
        }
        for name, run in runs.items()
    ]


def report(routers: list[dict[str, Any]]) -> Table:
    """Loss, utilization over the last steps, and speed."""
    title = f"mean of the last {moe_study.LAST} steps"
    table = Table("router", "loss", "min / max", "entropy", "dropped", "ms a step", title=title)
    for one in routers:
        last = one["losses"][-moe_study.LAST :]
        values = [sum(last) / len(last), one["min_over_max"], one["entropy"], one["dropped"]]
        table.add_row(one["router"], *(f"{value:.3f}" for value in values), f"{one['ms_per_step']:.1f}")
    return table


def plot(routers: list[dict[str, Any]], path: Path, speed: bool = True) -> None:
    """Loss curves (means of ten steps), utilization, and speed."""
    import matplotlib
    from matplotlib.figure import Figure

    names, panels = [one["router"] for one in routers], 3 if speed else 2
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure = Figure(figsize=(5.5 * panels, 5), layout="constrained")
        axes = figure.subplots(1, panels)
        for index, one in enumerate(routers):
            windows = [one["losses"][max(0, end - 10) : end] for end in range(1, len(one["losses"]) + 1)]
            means = [sum(window) / len(window) for window in windows]
            axes[0].plot(means, label=one["router"], linewidth=1, linestyle="-" if index < 10 else "--")
        axes[0].set(xlabel="step", ylabel="loss", title="loss on the same batches, means of ten steps")
        axes[0].legend(fontsize=8)
        axes[1].barh(names, [one["min_over_max"] for one in routers])
        axes[1].set(xlim=(0, 1), title="smallest over largest load of an expert")
        if speed:
            axes[2].barh(names, [one["ms_per_step"] for one in routers])
            axes[2].set(title="ms a step")
        for drawn in axes[1:]:
            drawn.invert_yaxis()
        about = {"Date": None, "Creator": None, "Description": moe_study.digest(routers)}
        figure.savefig(path, dpi=110, metadata=about if path.suffix == ".svg" else None)


def main(arguments: list[str] | None = None) -> dict[str, Run]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--steps", type=int, help="training steps; 300, or 30 with --tiny")
    parser.add_argument("--only", nargs="+", help="names of the variants; all by default")
    parser.add_argument("--out", type=Path, default=Path("moe_study.png"), help="where the plot goes")
    parser.add_argument("--save", type=Path, help="a results folder for losses and utilization, such as results/cpu")
    parser.add_argument("--usage", type=Path, help="where a heat map of the last variant's experts goes")
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiny = chosen.tiny or device.type == "cpu"
    sizes, text = TINY if tiny else LARGE, corpus()
    known = {one.name: one for one in variants(sizes.k)}
    unknown = [name for name in chosen.only or () if name not in known]
    if unknown:
        parser.error(f"--only: there is no {unknown[0]!r}; there are {', '.join(known)}")
    wanted = [one for name, one in known.items() if chosen.only is None or name in chosen.only]
    if chosen.steps is not None and chosen.steps < 1:
        parser.error(f"--steps is {chosen.steps}; it must be at least 1")
    steps = chosen.steps or (30 if tiny else 300)
    runs = {one.name: train(one, sizes, steps, text, device) for one in wanted}
    console, routers = Console(), summary(runs)
    console.print(report(routers))
    if chosen.save is not None:  # before other files change the checkout, whose commit is recorded
        given = sys.argv[1:] if arguments is None else arguments
        name, kept = devices.properties(device).name, {**asdict(sizes), "steps": steps}
        timed = [{key: value for key, value in one.items() if not tiny or key != "ms_per_step"} for one in routers]
        console.print(f"results: {moe_study.save(chosen.save, name, kept, timed, given)}")
    plot(routers, chosen.out, speed=not tiny)  # that of a tiny model says nothing
    console.print(f"plot: {chosen.out}")
    if chosen.usage is not None:
        list(runs.values())[-1].usage.plot(chosen.usage)
        console.print(f"utilization of {wanted[-1].name}: {chosen.usage}")
    return runs


if __name__ == "__main__":
    main()
