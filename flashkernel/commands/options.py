"""Options that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from flashkernel.lab.output import Format


class Direction(str, Enum):
    fwd = "fwd"
    bwd = "bwd"
    step = "fwd+bwd"


def _lower(name: str | None) -> str | None:
    return None if name is None else name.lower()


Names = Annotated[list[str] | None, typer.Argument(help="Operators; by default all.", show_default=False)]
Formatted = Annotated[Format, typer.Option("--format", "-f", help="Output format.")]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="float32, float16, bfloat16 or float64; repeatable.")]
Cases = Annotated[list[str] | None, typer.Option("--case", help="Cases whose names match this glob; repeatable.")]
OnDevice = Annotated[
    str | None,
    typer.Option("--device", callback=_lower, help="cpu, cuda or cuda:1; by default the GPU, if there is one."),
]
AnyDevice = Annotated[
    str | None,
    typer.Option("--device", callback=_lower, help="cpu, cuda, or a GPU by name (t4, h200, ...), present or not."),
]
Save = Annotated[
    Path | None, typer.Option("--save", metavar="DIR", help="Merge the records into the JSON files of this folder.")
]
Commit = Annotated[str | None, typer.Option(help="The commit to record, where there is no git checkout.")]
Model = Annotated[
    str, typer.Option("--model", "-m", help="A folder, a GGUF file, a cached owner/name, or smollm2 (downloaded).")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Maximum number of tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens whose probabilities sum to p.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop before this string; repeatable.")]
ModelDtype = Annotated[str | None, typer.Option("--dtype", help="float32, float16 or bfloat16.")]
