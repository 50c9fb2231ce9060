"""The `flashkernel` command. Results go to standard output, progress and remarks to standard error.

Exit codes: 0 all well, 1 something failed its check or is broken, 2 a name or value that does not exist, 130 stopped by
Ctrl-C (what was measured until then is kept and printed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from flashkernel.commands import demo, machine, measure, report, text

app = typer.Typer(
    help="The kernels an LLM is made of: what runs here, whether it is right, and how fast it is.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMMANDS: dict[Callable[..., Any], str] = {  # each with an example, in the order of the help
    machine.doctor: "doctor",
    machine.ops: "ops --device t4 --why",
    machine.explain: "explain rms_norm rows=4096 width=8192 --dtype bfloat16 --device h200",
    measure.check: "check rms_norm --backend triton --dtype float16",
    measure.bench: "bench rms_norm softmax --case '16384x4096' --save results/h200",
    measure.step: "step --tokens 8192 --save results/h200",
    measure.e2e: "e2e --model llama-3.2-1b --contender engine --batch 1 16 64 --save results/h200",
    demo.demo: "demo --check --quick",
    text.generate: 'generate "Write a line about the sea." --temperature 0.7',
    text.chat: "chat --model ~/models/Llama-3.2-1B-Instruct",
    text.serve: "serve ~/models/Llama-3.2-1B-Instruct --port 8000 --api-key-file key.txt",
    report.tables: "tables --write",
    report.plot: "plot results/h200 --out charts",
    measure.tune: "tune rms_norm --case 16384x4096",
}
for function, example in COMMANDS.items():
    app.command(epilog=f"Example: flashkernel {example}")(function)
