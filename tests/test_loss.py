"""What the table cannot say of the losses: torch as a witness, chunking, wrong targets, a graph used twice."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from compiled import compiled

import flashkernel as fk
from flashkernel.core import device as devices
from flashkernel.core.launch import collect_launches
from flashkernel.ops.loss import linear
from flashkernel.ops.loss import triton as kernels
from flashkernel.ops.loss.params import LossParams

BACKENDS = ("reference", "torch", "triton")
by_backend = pytest.mark.parametrize("backend", BACKENDS)


def _logits(rows: int = 6, classes: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, classes), torch.randint(0, classes, (rows,))


@by_backend
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_agrees_with_torch(backend: str, reduction: str, smoothing: float) -> None:
    logits, target = _logits()
    target[2] = 4
    options = {"ignore_index": 4, "label_smoothing": smoothing, "reduction": reduction}
    torch.testing.assert_close(
        fk.cross_entropy(logits, target, **options, backend=backend), F.cross_entropy(logits, target, **options)
    )


def test_z_loss_and_softcap_by_hand() -> None:
    logits, target = torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.tensor([0])
    normalizer = math.log(math.exp(1) + math.exp(2))
    expected = normalizer - 1 + 0.5 * normalizer**2
    assert fk.cross_entropy(logits, target, z_loss=0.5, backend="reference").item() == pytest.approx(expected)
    capped = [3 * math.tanh(value / 3) for value in (1.0, 2.0)]
    expected = math.log(sum(math.exp(value) for value in capped)) - capped[0]
    assert fk.cross_entropy(logits, target, softcap=3.0, backend="reference").item() == pytest.approx(expected)


@by_backend
def test_all_targets_ignored_gives_zero(backend: str) -> None:
    logits, _ = _logits()
    logits.requires_grad_()
    loss = fk.cross_entropy(logits, torch.full((6,), -100), backend=backend)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("wrong", [11, 10**9, -1])
def test_kernels_never_follow_a_target_out_of_range(wrong: int) -> None:
    logits, target = _logits()
    target[3] = wrong
    logits.requires_grad_()
    loss = fk.cross_entropy(logits, target, reduction="none", backend="triton")
    assert loss.isnan().tolist() == [False, False, False, True, False, False]
    (gradient,) = torch.autograd.grad(loss[torch.tensor([0, 1, 2, 4, 5])].sum(), logits)
    assert torch.isfinite(gradient[[0, 1, 2, 4, 5]]).all()


def test_infinite_logits() -> None:
    logits, target = _logits()
    logits[:, 7] = float("-inf")
    target[target == 7] = 0
    expected = F.cross_entropy(logits, target)
    torch.testing.assert_close(fk.cross_entropy(logits, target, backend="triton"), expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_chunks_add_up(backend: str, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, the last one short, give what one chunk gives."""
    torch.manual_seed(0)
    x, weight = torch.randn(10, 8, requires_grad=True), torch.randn(13, 8, requires_grad=True)
    bias, target = torch.randn(13, requires_grad=True), torch.randint(0, 13, (10,))

    def run() -> tuple[torch.Tensor, ...]:
        loss = fk.linear_cross_entropy(x, weight, target, bias, reduction=reduction, backend=backend)
        return (loss.detach(), *torch.autograd.grad(loss.square().sum(), (x, weight, bias)))

    whole = run()
    monkeypatch.setattr(linear, "chunk_rows", lambda rows, classes, size: 4)
    monkeypatch.setattr("flashkernel.ops.loss.torch.CHUNK_BYTES", 4 * 4 * 13)
    for chunked, one in zip(run(), whole):
        torch.testing.assert_close(chunked, one)


@pytest.mark.parametrize("rows", [3, 600])
@pytest.mark.parametrize("kept_graph", [False, True])
def test_a_mean_leaves_float16_its_small_gradients(rows: int, kept_graph: bool) -> None:
    """Class 0 has 99% of the probability. That of each other one, divided by 600 targets, is below what float16 has."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 8).half().requires_grad_(), (torch.randn(1000, 8) / 8).half().requires_grad_()
    bias = torch.zeros(1000).half().requires_grad_()
    bias.data[0] = 12
    target = torch.zeros(rows, dtype=torch.int64)
    target[1] = -100

    def gradients(backend: str, *inputs: torch.Tensor) -> list[torch.Tensor]:
        x, weight, bias = inputs
        loss = fk.linear_cross_entropy(x, weight, target, bias, backend=backend) * 4096  # as a loss scaler multiplies
        return [one.double() for one in torch.autograd.grad(loss, inputs, retain_graph=kept_graph)]

    inputs = (x, weight, bias)
    exact = gradients("reference", *[one.detach().double().requires_grad_() for one in inputs])
    for found, wanted in zip(gradients("triton", *inputs), exact):
        assert (found - wanted).norm() < 0.01 * wanted.norm()


def test_a_sum_of_many_targets_fits_float16() -> None:
    """Its gradient, before the caller divides the loss by the number of targets, is beyond 65504."""
    x = torch.full((1000, 8), 100.0).half()
    weight = torch.zeros(4, 8).half().requires_grad_()
    target = torch.zeros(1000, dtype=torch.int64)
    loss = fk.linear_cross_entropy(x, weight, target, reduction="sum", backend="triton") / 1000
    (found,) = torch.autograd.grad(loss, weight)
    expected = torch.full((4, 8), 25.0)
    expected[0] = -75.0
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=0.0)


def test_kept_graph_gives_the_same_gradient_twice() -> None:
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    loss = fk.linear_cross_entropy(x, weight, torch.randint(0, 7, (5,)), backend="triton") * 3
    first = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight))
    for a, b in zip(first, second):
        assert torch.equal(a, b)


def test_only_the_gradients_asked_for() -> None:
    x, weight = torch.randn(5, 4), torch.randn(7, 4, requires_grad=True)
    loss = fk.linear_cross_entropy(x, weight, torch.randint(0, 7, (5,)), backend="triton")
    loss.backward()
    assert x.grad is None
    assert weight.grad is not None
    with torch.no_grad():
        assert not fk.linear_cross_entropy(x, weight, torch.randint(0, 7, (5,)), backend="triton").requires_grad


def test_wrong_inputs() -> None:
    logits, target = _logits()
    with pytest.raises(ValueError, match="one class index per row"):
        fk.cross_entropy(logits, target[:4])
    with pytest.raises(ValueError, match="integers"):
        fk.cross_entropy(logits, target.float())
    with pytest.raises(ValueError, match="reduction is 'average'"):
        fk.cross_entropy(logits, target, reduction="average")
    with pytest.raises(ValueError, match="label_smoothing"):
        fk.cross_entropy(logits, target, label_smoothing=1.5)
    with pytest.raises(ValueError, match=r"weight must be \(classes, 11\)"):
        fk.linear_cross_entropy(logits, torch.randn(3, 10), target)
    with pytest.raises(ValueError, match="cast one, or use autocast"):
        fk.linear_cross_entropy(logits, torch.randn(3, 11).half(), target)
    with pytest.raises(ValueError, match="bias"):
        fk.linear_cross_entropy(logits, torch.randn(3, 11), target, torch.randn(4))


@pytest.mark.compile
def test_no_thread_overwrites_the_logit_of_a_target_that_another_has_yet_to_load() -> None:
    """In place, the gradient of a row begins behind a barrier that follows the load of the target's logit."""
    logits, loss = torch.empty((8, 4096), dtype=torch.bfloat16, device="meta"), torch.empty(8, device="meta")
    target = torch.empty(8, dtype=torch.int64, device="meta")
    with devices.pretend(devices.KNOWN["h200"]), collect_launches() as launches:
        kernels.launch_forward(logits, target, loss, loss, None, LossParams(), True)
    sass = compiled(launches[0], 90).sass
    after_load = sass.index("LDG.E.U16")
    gradient = sass.index("LDG.E.128", after_load)  # the row is read again
    assert "BAR.SYNC" in sass[after_load:gradient]
