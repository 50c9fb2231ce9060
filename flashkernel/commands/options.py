"""Options that several commands share."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from flashkernel.lab.screen import Format


class Direction(str, Enum):
    fwd = "fwd"
    bwd = "bwd"
    step = "fwd+bwd"


Names = Annotated[
    list[str] | None, typer.Argument(help="Operators; all of them where none is named.", show_default=False)
]
Formatted = Annotated[Format, typer.Option("--format", "-f", help="How results are printed.")]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help="float32, float16, bfloat16 or float64; repeatable.")]
Cases = Annotated[list[str] | None, typer.Option("--case", help="Cases whose names match this glob; repeatable.")]
OnDevice = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or cuda:1; by default the GPU, if there is one.")
]
Model = Annotated[
    str, typer.Option("--model", "-m", help="A folder as Transformers saves it, a GGUF file, or smollm2 (fetched).")
]
MostTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="The most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token; higher is more varied.")]
TopK = Annotated[int, typer.Option(help="Draw from so many of the likeliest tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens that have this probability together.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the text before this string; repeatable.")]
ModelDtype = Annotated[str | None, typer.Option("--dtype", help="float32, float16 or bfloat16.")]
AnyDevice = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, or a GPU that need not be here: t4, h200, ...")
]
Commit = Annotated[str | None, typer.Option(help="The commit to record, where there is no git checkout.")]
