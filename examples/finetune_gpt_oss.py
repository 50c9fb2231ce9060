"""Fine-tune gpt-oss. With a folder: LoRA on attention and router of the released model, experts frozen in MXFP4.

Without one, a small gpt-oss (grouped heads, windows, learned sinks, experts) is trained with eager and with FlashKernel
attention. Both runs start from the same weights and see the same batches: this project's own documents, byte by byte.
The two loss curves must lie on each other; time and memory must not.

    python examples/finetune_gpt_oss.py openai/gpt-oss-20b      # downloaded, or a folder; a GPU with 24 GB or more
    python examples/finetune_gpt_oss.py                         # on a GPU: 4 layers, 300 steps of 2048 tokens
    python examples/finetune_gpt_oss.py --tiny                  # on a CPU: 2 layers, 30 steps of 128 tokens
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lora_gpt_oss
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import GptOssConfig, GptOssForCausalLM

import flashkernel.hf  # registers "fkernel"
from flashkernel.engine import ModelError

ROOT = Path(__file__).resolve().parent.parent
IMPLEMENTATIONS = ("eager", "fkernel")


def corpus() -> torch.Tensor:
    """The project's documents as bytes."""
    paths = sorted(path for path in ROOT.rglob("*.md") if ".venv" not in path.parts)
    return torch.tensor(list("\n\n".join(path.read_text() for path in paths).encode()), dtype=torch.long)


def config(tiny: bool) -> GptOssConfig:
    size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8} if tiny else {
        "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 16,
    }  # fmt: skip
    return GptOssConfig(
        vocab_size=256,
        num_key_value_heads=2,
        head_dim=16 if tiny else 64,
        num_local_experts=4 if tiny else 8,
        num_experts_per_tok=2,
        sliding_window=32 if tiny else 128,
        layer_types=["sliding_attention", "full_attention"] * (1 if tiny else 2),
        max_position_embeddings=131072,
        **size,
    )


def train(implementation: str, tiny: bool, steps: int, length: int, device: torch.device) -> lora_gpt_oss.Run:
    torch.manual_seed(0)
    model = GptOssForCausalLM._from_config(config(tiny), attn_implementation=implementation).to(device)
    if device.type == "cuda":
        model = model.bfloat16()
        torch.cuda.reset_peak_memory_stats(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if tiny else 3e-4)
    text, result = corpus(), lora_gpt_oss.Run(length, sum(one.numel() for one in model.parameters()))
    generator = torch.Generator().manual_seed(1)
    for _ in track(range(steps), description=f"{implementation:8}"):
        start = int(torch.randint(0, len(text) - length, (1,), generator=generator))
        tokens = text[start : start + length][None].to(device)
        result.step(model, optimizer, {"input_ids": tokens, "labels": tokens})
    if device.type == "cuda":
        result.peak_bytes = torch.cuda.max_memory_allocated(device)
    return result


def report(runs: dict[str, lora_gpt_oss.Run]) -> Table:
    table = Table("attention", "first loss", "last loss", "ms a step", "peak memory")
    for name, run in runs.items():
        memory = f"{run.peak_bytes / 1e9:.2f} GB" if run.peak_bytes else "not measured on a CPU"
        table.add_row(
            name, f"{run.losses[0]:.4f}", f"{run.losses[-1]:.4f}", f"{run.middle_seconds() * 1e3:.1f}", memory
        )
    return table


def plot(runs: dict[str, lora_gpt_oss.Run], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for (name, run), style in zip(runs.items(), ("-", "--")):
        axes.plot(run.losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss", title="gpt-oss, the same batches")
    axes.legend()
    figure.savefig(path, dpi=120)


def positive(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def main(arguments: list[str] | None = None) -> dict[str, lora_gpt_oss.Run]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="gpt-oss as it was released: LoRA on packed sequences")
    parser.add_argument("--rank", type=positive, default=16, help="of the adapters")
    parser.add_argument("--tiny", action="store_true", help="a model and a text length for a CPU")
    parser.add_argument("--steps", type=positive, help="training steps; 300, or 30 with --tiny")
    parser.add_argument("--length", type=positive, help="tokens a step; 2048, or 128 with --tiny")
    parser.add_argument("--out", type=Path, default=Path("gpt_oss_loss.png"), help="where the plot goes")
    chosen = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.folder is not None:
        try:
            run = lora_gpt_oss.train(chosen.folder, chosen.rank, chosen.steps or 50, chosen.length or 4096, device)
        except (FileNotFoundError, ModelError) as error:
            parser.error(str(error))
        Console().print(lora_gpt_oss.report(run))
        return {"lora": run}
    tiny = chosen.tiny or device.type == "cpu"
    steps, length = chosen.steps or (30 if tiny else 300), chosen.length or (128 if tiny else 2048)
    if length >= len(corpus()):
        parser.error(f"--length: the text has {len(corpus())} tokens")
    flashkernel.hf.register()
    runs = {name: train(name, tiny, steps, length, device) for name in IMPLEMENTATIONS}
    console = Console()
    console.print(report(runs))
    gap = max(abs(a - b) for a, b in zip(runs["eager"].losses, runs["fkernel"].losses))
    console.print(f"largest difference between the curves: {gap:.2e}")
    plot(runs, chosen.out)
    console.print(f"plot: {chosen.out}")
    return runs


if __name__ == "__main__":
    main()
