"""The `flashkernel` command. Results go to standard output, progress and messages to standard error.

Exit codes: 0 success; 1 a check failed, nothing could be checked, or something is broken or not installed; 2 an unknown
name or value; 130 interrupted by Ctrl-C (what was measured until then is kept and printed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flashkernel import __version__
from flashkernel.commands import bench, bench_serve, check, demo, machine, models, profile, quantize, report, text


class Commands(TyperGroup):
    """`flashkernel bench serve` is a command of its own, with other options than `bench`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:2] == ["bench", "serve"]:
            args = ["bench-serve", *args[2:]]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=Commands,
    help="FlashKernel: kernels for LLMs. See what runs on this machine, check it, time it, and generate text with it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS: dict[Callable[..., Any], str] = {  # each with an example, in the order of the help
    machine.doctor: "doctor",
    machine.ops: "ops --device t4 --why",
    machine.explain: "explain rms_norm rows=4096 width=8192 --dtype bfloat16 --device h200",
    check.check: "check rms_norm --backend triton --dtype float16",
    bench.bench: "bench rms_norm softmax --case '16384x4096' --save results/h200",
    bench_serve.serve: "bench serve --load chat --rate 20 --rate 40 --ttft-limit 500 --itl-limit 50",
    profile.profile: "profile attention --backend triton --case 'd128-n4096*' --save results/h200",
    profile.roofline: "roofline --device t4 --from results/h200",
    models.step: "step --tokens 8192 --save results/h200",
    models.e2e: "e2e --model llama-3.2-1b --runner engine --batch 1 16 64 --save results/h200",
    demo.demo: "demo --check --quick",
    text.generate: 'generate "Write a line about the sea." --temperature 0.7',
    text.chat: "chat --model ~/models/Llama-3.2-1B-Instruct",
    text.serve: "serve ~/models/Llama-3.2-1B-Instruct --port 8000 --api-key-file key.txt",
    quantize.quantize: "quantize ~/models/Llama-3.2-1B --method gptq --bits 4 --group-size 128 --out Llama-3.2-1B-int4",
    quantize.perplexity: "perplexity smollm2 --compare --save results",
    report.tables: "tables --write",
    report.plot: "plot results/h200 --out charts",
    bench.tune: "tune rms_norm --case 16384x4096",
}
for function, example in COMMANDS.items():
    name = "bench-serve" if function is bench_serve.serve else None
    app.command(name, epilog=f"Example: flashkernel {example}")(function)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashkernel {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
