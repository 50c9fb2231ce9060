"""The reductions in CUDA C++: their text and Python agree, compile without spills, and see what they should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import flashkernel as fk
from flashkernel.blocks.cuda_headers import CUDA_HEADERS
from flashkernel.core.check import compare
from flashkernel.ops.reduce import kinds, spec

PACKAGE = Path(fk.__file__).parent / "ops" / "reduce"


def test_cuda_text_and_python_agree() -> None:
    from flashkernel.ops.reduce import cuda

    text = (PACKAGE / "row.cuh").read_text()
    names = re.search(r"enum Kind \{([^}]*)\}", text)[1].replace(",", " ").split()
    assert names == [name for name, _ in sorted(_kinds().items(), key=lambda item: item[1])]
    maskings = re.search(r"enum Masking \{([^}]*)\}", (PACKAGE / "kernel.cu").read_text())[1].replace(",", " ").split()
    assert [getattr(cuda, name) for name in maskings] == [0, 1, 2]
    for name in ("WARP", "IN_FLIGHT", "MAX_THREADS"):
        assert int(re.search(rf"constexpr int {name} = (\d+);", text)[1]) == getattr(cuda, name)
    kernels = (PACKAGE / "kernel.cu").read_text()
    for name, arguments in cuda._ARGUMENTS.items():
        parameters = re.search(rf"\b{name}\(([^)]*)\) \{{", kernels)[1].split(",")
        assert [_argument_type(parameter) for parameter in parameters] == arguments.split(", "), name


def _kinds() -> dict[str, int]:
    return {name: value for name, value in vars(kinds).items() if name.isupper()}


def _argument_type(parameter: str) -> str:
    if "*" in parameter:
        return "pointer"
    return {"Index": "int64", "int": "int32", "float": "float32"}[parameter.split()[0]]


def _instances(element: str, vector: int) -> list[str]:
    """One of every kernel and kind for an element type, as the launchers ask for them."""
    names = [
        f"row_reduce<{element}, {element}, {kind}, {raw}, false>"
        for kind in range(kinds.LOGSUMEXP + 1)
        for raw in ("false", "true")
    ]
    names += [f"row_reduce<{element}, {element}, {kinds.SOFTMAX}, true, {masked}>" for masked in ("false", "true")]
    names += [f"finish_rows<{element}, {kind}>" for kind in range(kinds.LOGSUMEXP + 1)]
    for size, values in ((vector, (8, 16, 32)), (1, (8, 16))):
        for count in values:
            names += [f"row_softmax<{element}, {size}, {count // size}, {masking}>" for masking in range(3)]
            names += [f"row_softmax_backward<{element}, {size}, {count // size}>"]
        for kind in range(kinds.MAX, kinds.SOFTMAX_BACKWARD + 1):
            items = 2 if size > 1 and kind != kinds.SOFTMAX_BACKWARD else 1
            masks = ("false", "true") if kind == kinds.SOFTMAX else ("false",)
            names += [f"spread_rows<{element}, {size}, {kind}, {items}, {masked}>" for masked in masks]
        names += [f"weighted_backward<{element}, {element}, {share}, {size}>" for share in {element, "float"}]
    names += [f"weighted_backward<{element}, float, float, {vector}>", f"column_sum<{element}>"]
    return list(dict.fromkeys(names))


@pytest.mark.compile
@pytest.mark.parametrize(
    "element, vector, arch",
    [
        ("float", 4, "sm_90"), ("__half", 8, "sm_75"), ("__nv_bfloat16", 8, "sm_90"),
        pytest.param("float", 4, "sm_75", marks=pytest.mark.every_arch),
        pytest.param("__half", 8, "sm_90", marks=pytest.mark.every_arch),
        pytest.param("__nv_bfloat16", 8, "sm_75", marks=pytest.mark.every_arch),
    ],
)  # fmt: skip
def test_cuda_text_compiles_without_spills(element: str, vector: int, arch: str) -> None:
    from compiled import disassemble

    from flashkernel.core.cuda import can_compile, compile_cubin

    if reason := can_compile():
        pytest.skip(reason)
    source, names = (PACKAGE / "kernel.cu").read_text(), _instances(element, vector)
    compiled = compile_cubin(source, names, arch, include=[PACKAGE, *CUDA_HEADERS])
    assert set(compiled.names) == set(names)
    assert compiled.spilled_bytes == 0, compiled.log
    assert compiled.log.count("registers") >= len(names), "ptxas reported on fewer kernels than were asked for"
    machine_code = disassemble(compiled.code)
    assert ("ACQBULK" in machine_code) == (arch == "sm_90"), "kernels that start early wait before they read"
    of_rows = {symbol: name for name, symbol in compiled.names.items() if re.match("row_softmax|spread_rows", name)}
    for function in machine_code.split("Function : ")[1:]:
        name = of_rows.get(function.split()[0])
        if name is not None and f"<{element}, {vector}," in name:
            assert "LDG.E.128" in function, f"{name}: no 16-byte loads"
            stores = set(re.findall(r"STG\S*", function))
            assert {store[:9] for store in stores} == {"STG.E.128"}, f"{name} stores by {stores}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1024, 2048, 4096, 8192, 16384, 20480])
def test_cuda_sees_what_it_should_at_every_width(width: int, dtype: torch.dtype) -> None:
    """Vectors that the diagonal passes through, masks that come in one load and byte by byte, few rows and many."""
    generator = torch.Generator("cuda").manual_seed(width)
    for batches, queries in ((1, 5), (2, 300), (8, 300)):
        x = torch.randn(batches, queries, width, generator=generator, device="cuda").to(dtype)
        visible = torch.rand(queries, width + 3, generator=generator, device="cuda") < 0.6
        visible[2] = False
        for mask in (None, visible[:, :width].contiguous(), visible[:, 3:], visible[:, :1]):
            for causal in (False, True):
                exact = fk.softmax(x.double(), mask, scale=0.5, causal=causal, backend="reference")
                own = fk.softmax(x, mask, scale=0.5, causal=causal, backend="torch")
                found = fk.softmax(x, mask, scale=0.5, causal=causal, backend="cuda")
                report = compare("softmax", found, exact, own, spec.SOFTMAX.tolerance, dtype)
                assert report.ok, report.message


@pytest.mark.gpu
def test_cuda_kernels_in_a_chain_see_what_came_before() -> None:
    """Small ones start before the one before them has ended; each reads what that one wrote, into reused memory."""
    inputs = [torch.randn(16, 128256, device="cuda").bfloat16() for _ in range(8)]
    hurried = [fk.max(fk.softmax(inputs[turn % 8], backend="cuda"), backend="cuda") for turn in range(200)]
    torch.cuda.synchronize()
    for turn, found in enumerate(hurried):
        y = fk.softmax(inputs[turn % 8], backend="cuda")
        torch.cuda.synchronize()
        assert torch.equal(found, y.amax(-1)), f"turn {turn}"


@pytest.mark.gpu
def test_cuda_spreads_more_rows_than_a_grid_dimension_holds() -> None:
    x = torch.randn(65535 + 700, 24, device="cuda", requires_grad=True)
    dy = torch.randn(x.shape[0], device="cuda")
    found, own = (torch.autograd.grad(fk.logsumexp(x, backend=name), x, dy)[0] for name in ("cuda", "torch"))
    report = compare("dx", found, x.detach().double().softmax(-1) * dy[:, None], own, spec.LOGSUMEXP.tolerance, x.dtype)
    assert report.ok, report.message
