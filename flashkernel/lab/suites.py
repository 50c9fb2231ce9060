"""Named grids of benchmark cases over several operators, each saved in a file of its own: `flashkernel bench --suite`.

`turing` is the grid that kernels for a T4 are compared on: sequence lengths 512 to 4096, head dims 64 and 128, batches
1, 4 and 8, float16 and float32, forward, against PyTorch eager and torch.compile(mode="max-autotune"). All models in it
have 16 heads. The kernels are tiled FlashAttention, GeLU(linear), RoPE, attention over a paged KV cache with pages of
256 tokens, and a row reduction. max-autotune takes seconds to compile for each case, so by default a sample of the
cases has it.

`moe` is the layers of gpt-oss-20b, Mixtral and Qwen3-30B at 1 to 16,384 tokens, against vLLM's and Transformers'
experts, with the routers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch

from flashkernel.core.op import Baseline, Case, Op, resolve
from flashkernel.core.shapes import MODELS
from flashkernel.lab import selection
from flashkernel.ops import registry

LENGTHS, HEAD_DIMS, BATCHES = (512, 1024, 2048, 4096), (64, 128), (1, 4, 8)
AUTOTUNED_BATCH, AUTOTUNED_LENGTHS = 8, (1024, 4096)  # the cases that max-autotune is timed on, of both head dims
HEADS, PAGE = 16, 256
DTYPES = (torch.float16, torch.float32)
EAGER = "eager"
MAX_AUTOTUNE = Baseline("max_autotune", f"{__name__}:max_autotune")


@dataclass(frozen=True)
class Suite:
    """A grid of cases: by operator its cases, and the implementations that are timed on them."""

    name: str
    cases: dict[str, tuple[Case, ...]]
    implementations: dict[str, tuple[str, ...]]
    directions: tuple[str, ...]
    budget_s: float  # seconds for each measurement: hundreds of them must end within minutes
    autotuned: frozenset[str]  # the cases that are timed against max-autotune where not all are

    def times_autotuned(self, case: Case) -> bool:
        """True for a case of the sample, also where its sizes were scaled down."""
        return case.name.partition("~")[0] in self.autotuned


def max_autotune(op: Op, case: Case) -> Callable[..., Any]:
    """The eager baseline under torch.compile(mode="max-autotune"), compiled for each shape.

    The mode is "max-autotune-no-cudagraphs": the same kernels without torch's own CUDA graphs, which copy every input
    to a fixed address first. The timer captures the calls into a graph itself, as it does for all implementations.
    """
    eager = next((baseline for baseline in op.baselines if baseline.name == EAGER), None)
    if eager is None:
        raise ValueError(f"{op.name} has no eager baseline to compile")
    return torch.compile(resolve(eager.target)(op, case), mode="max-autotune-no-cudagraphs", dynamic=False)


def _case(name: str, axes: dict[str, Any], options: dict[str, Any] | None = None, **more: Any) -> Case:
    return Case(name, axes, options or {}, dtypes=DTYPES, gradients=False, **more)


def _attention(batch: int, length: int, dim: int) -> Case:
    axes = {"batch": batch, "queries": length, "keys": length, "heads": HEADS, "kv_heads": HEADS, "head_dim": dim,
            "value_dim": dim}  # fmt: skip
    checked = {"batch": 1, "queries": min(length, 1024), "keys": min(length, 1024)}
    return _case(f"attention-b{batch}-n{length}-d{dim}", axes, {"causal": True}, check_axes=checked)


def _gelu_linear(batch: int, length: int) -> Case:
    sizes = MODELS["gpt2"]
    axes = {"rows": batch * length, "inner": sizes.hidden, "columns": sizes.intermediate}
    return _case(f"gelu-linear-b{batch}-n{length}", axes, {"activation": "gelu_tanh"}, present=("bias",),
                 check_axes={"rows": 512})  # fmt: skip


def _rope(batch: int, length: int, dim: int) -> Case:
    axes = {"batch": batch, "seq": length, "heads": HEADS, "kv_heads": HEADS, "dim": dim, "table": (length, dim // 2)}
    return _case(f"rope-b{batch}-n{length}-d{dim}", axes, present=("k", "cos", "sin"), check_axes={"batch": 1})


def _paged(batch: int, length: int, dim: int) -> Case:
    pages = length // PAGE
    axes = {"batch": batch, "new": 1, "heads": HEADS, "kv_heads": HEADS, "head_dim": dim, "value_dim": dim,
            "cache": (batch * pages + 3, PAGE), "max_pages": pages}  # fmt: skip
    return _case(f"paged-kv-b{batch}-n{length}-d{dim}", axes, present=("page_table",),
                 check_axes={"batch": 1, "cache": (pages + 3, PAGE)})  # fmt: skip


def _reduction(batch: int, length: int, dim: int) -> Case:
    return _case(f"row-sum-b{batch}-n{length}-d{dim}", {"rows": batch * length, "width": HEADS * dim},
                 check_axes={"rows": 512})  # fmt: skip


@cache
def _turing() -> Suite:
    grid = list(product(BATCHES, LENGTHS, HEAD_DIMS))
    sample = re.compile(f"-b{AUTOTUNED_BATCH}-n({'|'.join(map(str, AUTOTUNED_LENGTHS))})(-|$)")
    kernels = ("cuda", "cuda_sm75", "triton")
    cases = {
        "attention": tuple(_attention(*sizes) for sizes in grid),
        "linear": tuple(_gelu_linear(batch, length) for batch, length in product(BATCHES, LENGTHS)),
        "rope": tuple(_rope(*sizes) for sizes in grid),
        "decode_attention": tuple(_paged(*sizes) for sizes in grid),
        "sum": tuple(_reduction(*sizes) for sizes in grid),
    }
    return Suite(
        name="turing",
        cases=cases,
        implementations={
            "attention": (*kernels, EAGER),
            "linear": (*kernels, "torch", EAGER),
            "rope": (*kernels, EAGER),
            "decode_attention": (*kernels, EAGER),
            "sum": (*kernels, EAGER),
        },
        directions=("fwd",),
        budget_s=0.02,
        autotuned=frozenset(case.name for group in cases.values() for case in group if sample.search(case.name)),
    )


@cache
def _moe() -> Suite:
    implementations = {
        "moe_experts": ("hopper", "triton", "vllm", "hf_grouped", "hf_eager"),
        "moe_route": ("triton", EAGER),
        "moe_sort": ("triton",),
    }
    return Suite(
        name="moe",
        cases={name: registry()[name].benches for name in implementations},
        implementations=implementations,
        directions=("fwd", "bwd", "fwd+bwd"),
        budget_s=0.3,
        autotuned=frozenset(),
    )


SUITES: dict[str, Callable[[], Suite]] = {"turing": _turing, "moe": _moe}


def find(name: str) -> Suite:
    """A suite by name; UnknownNameError for another name."""
    (known,) = selection.known_names("suite", [name], SUITES)
    return SUITES[known]()


def cases_of(op: str) -> Sequence[Case]:
    """The cases of an operator in all suites."""
    return [case for suite in SUITES.values() for case in suite().cases.get(op, ())]
