"""The Hopper attention kernels under masks with tables: block-sparse, column intervals, boolean tensors, documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled import compiled
from emulated_hopper import check_case, emulated
from in_turn import in_turn
from sass import StackTraffic, stack_traffic

import flashkernel as fk
from flashkernel.blocks.mask import Mask, block_sparse, causal, column_intervals, documents, prefix, tensor_mask, window
from flashkernel.core import device as devices
from flashkernel.core.check import verify
from flashkernel.core.launch import Launch, collect_launches
from flashkernel.core.op import Case
from flashkernel.ops.attention import hopper
from flashkernel.ops.attention.spec import ATTENTION
from flashkernel.ops.attention.workload import axes_of

LENGTH = 260


@pytest.fixture(autouse=True)
def _emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 whose Gluon kernels run in the emulator, on 3 SMs, and others in Triton's interpreter."""
    with emulated(request, monkeypatch, hopper.forward_launch, hopper.backward_launch):
        yield


def _random(*shape: int, device: str) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)).to(device)


def _blocks(device: str, length: int) -> Mask:
    """Blocks of 32, by batch and head; a row of blocks that sees nothing, and a column that is not seen."""
    size = -(-length // 32)
    layout = _random(2, 4, size, size, device=device) < 0.4
    layout[:, :, 1] = False
    layout[:, :, :, 3] = False
    layout[:, :, 2] |= torch.arange(size, device=device) == 0
    return block_sparse(layout, 32)


def _intervals(device: str, length: int) -> Mask:
    """FlashMask: each key is hidden from an interval of queries."""
    start = (_random(2, length, device=device) * length).int()
    return column_intervals(start, start + (_random(2, length, device=device) * 40).int()) & causal()


def _tensor(device: str, length: int) -> Mask:
    seen = _random(2, 1, length, length, device=device) < 0.3
    seen[:, :, :, 0] = True
    return tensor_mask(seen)


def _tensor_by_head(device: str, length: int) -> Mask:
    return tensor_mask(_random(1, 4, length, length, device=device) < 0.02)  # some rows see nothing


def _unsorted(device: str, length: int) -> Mask:
    """Documents whose tokens are not next to each other."""
    return documents((torch.arange(length, device=device) // 30 % 4).to(torch.int32).repeat(2, 1)) & causal()


def _cross(device: str, length: int) -> Mask:
    ids = (torch.arange(length, device=device) // 70).to(torch.int32)
    return documents(ids, ids.flip(0)) | window(20)


def _prefixes(device: str, length: int) -> Mask:
    return prefix(torch.tensor([17, 150], dtype=torch.int32, device=device)) | causal()


MASKS: dict[str, Callable[[str, int], Mask]] = {
    "blocks": _blocks, "intervals": _intervals, "tensor": _tensor, "tensor-by-head": _tensor_by_head,
    "unsorted": _unsorted, "cross": _cross, "prefixes": _prefixes,
}  # fmt: skip


@pytest.mark.parametrize("name, head_dim", in_turn(MASKS, [64, 128]))
def test_masks_with_tables(name: str, head_dim: int) -> None:
    """Forward and backward against the reference, GQA."""
    mask = MASKS[name]("cpu", LENGTH)
    check_case(ATTENTION, Case(name, axes_of(2, LENGTH, (4, 2), head_dim), {"mask": mask, "return_lse": True}))


@pytest.mark.parametrize("name", ["blocks", "tensor", "unsorted"])
def test_with_wide_heads_and_in_a_fixed_order(name: str) -> None:
    mask = MASKS[name]("cpu", LENGTH)
    check_case(ATTENTION, Case(name, axes_of(2, LENGTH, (4, 2), (192, 128)), {"mask": mask}))
    check_case(ATTENTION, Case(name, axes_of(2, LENGTH, (4, 2), 64), {"mask": mask, "deterministic": True}))


def test_selected_on_request() -> None:
    q = torch.zeros(2, LENGTH, 4, 64, dtype=torch.float16)
    for make in MASKS.values():
        answer = fk.explain(fk.attention, q, q, q, mask=make("cpu", LENGTH))
        assert answer.chosen == "triton", str(answer)
        verdict = next(verdict for verdict in answer.verdicts if verdict.backend == "hopper")
        assert verdict.reason is None
        assert "tables" in str(verdict.deprioritized)


def test_tables_are_read_again_after_a_write() -> None:
    q = torch.randn(1, 70, 2, 64, dtype=torch.float16)
    seen = torch.ones(1, 1, 70, 70, dtype=torch.bool).tril()
    mask = tensor_mask(seen)

    before = fk.attention(q, q, q, mask=mask, backend="hopper")
    seen[..., :40] = False
    seen[..., 0] = True
    after = fk.attention(q, q, q, mask=mask, backend="hopper")
    assert not torch.equal(before, after)
    wide = q.double()
    exact = fk.attention(wide, wide, wide, mask=mask, backend="reference")
    torch.testing.assert_close(after.double(), exact, rtol=0, atol=4e-3)


def _launches(mask: Mask, head_dim: int, length: int) -> list[Launch]:
    shape = (2, length, 4, head_dim)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta").requires_grad_() for _ in range(3))
    with devices.pretend(devices.KNOWN["h200"]), collect_launches() as launches:
        fk.attention(q, k, v, mask=mask, backend="hopper").sum().backward()
    return [launch for launch in launches if launch.constants.get("MASK") is not None]


@pytest.mark.compile
@pytest.mark.parametrize("name, head_dim", in_turn(MASKS, [64, 128], pytest.mark.every_config))
def test_machine_code_does_not_spill(name: str, head_dim: int) -> None:
    """No stack traffic in loops. Of heads of 128 the backward kernel has a little, in blocks that are masked: it holds
    dK and dV of 64 keys, S, dP and the addresses of the mask's tables."""
    launches = _launches(MASKS[name]("meta", 4096), head_dim, 4096)
    assert len(launches) == 2
    for launch in launches:
        machine = compiled(launch, 90)
        traffic = stack_traffic(machine.sass)
        found = f"{launch.name} {launch.constants['TRAITS']}: {machine.stack} bytes of stack, in loops {traffic}"
        if launch.name == "attention_backward" and head_dim == 128:
            assert traffic.stores <= 12, found
            assert traffic.loads <= 36, found
        else:
            assert traffic == StackTraffic(0, 0), found


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dims", [64, 128, (192, 128)], ids=str)
def test_masks_with_tables_on_a_gpu(name: str, dims: Any) -> None:
    case = Case(name, axes_of(2, 900, (4, 2), dims), {"mask": MASKS[name]("cuda", 900), "return_lse": True})
    reports = verify(ATTENTION, case, torch.bfloat16, "hopper", "cuda")
    assert all(report.ok for report in reports), "\n".join(report.message for report in reports)
