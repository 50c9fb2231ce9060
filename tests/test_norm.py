"""What the table cannot say of the norms: independent formulas, wrong inputs, saved statistics."""

from __future__ import annotations

import pytest
import torch

import flashkernel as fk
from flashkernel.ops.norm.configs import MIN_SHIFTED_WIDTH


def test_reference_against_formulas() -> None:
    x = torch.randn(5, 7, dtype=torch.float64)
    weight, bias = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    for row in range(5):
        values = x[row].tolist()
        mean_square = sum(value**2 for value in values) / 7
        expected = [value / (mean_square + 1e-6) ** 0.5 * w for value, w in zip(values, weight.tolist())]
        torch.testing.assert_close(
            fk.rms_norm(x, weight, backend="reference")[row], torch.tensor(expected, dtype=torch.float64)
        )
        mean = sum(values) / 7
        spread = (sum((value - mean) ** 2 for value in values) / 7 + 1e-5) ** 0.5
        expected = [(value - mean) / spread * w + b for value, w, b in zip(values, weight.tolist(), bias.tolist())]
        torch.testing.assert_close(
            fk.layer_norm(x, weight, bias, backend="reference")[row], torch.tensor(expected, dtype=torch.float64)
        )


def test_residual_returns_the_sum() -> None:
    x, residual = torch.randn(4, 6), torch.randn(4, 6)
    y, total = fk.rms_norm(x, residual=residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, fk.rms_norm(x + residual))


def test_gradient_through_the_sum_alone() -> None:
    """The sum may be all that is used downstream."""
    x, residual = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    for backend in ("torch", "triton"):
        _, total = fk.rms_norm(x, residual=residual, backend=backend)
        dx, dresidual = torch.autograd.grad(total.sum(), (x, residual))
        assert torch.equal(dx, torch.ones_like(x))
        assert torch.equal(dresidual, torch.ones_like(x))


@pytest.mark.parametrize("norm", [fk.rms_norm, fk.layer_norm])
def test_wrong_inputs(norm: object) -> None:
    x = torch.randn(4, 6)
    with pytest.raises(ValueError, match=r"weight is torch.float32 \(5,\)"):
        norm(x, torch.randn(5))
    with pytest.raises(ValueError, match="residual"):
        norm(x, residual=torch.randn(4, 5))
    with pytest.raises(ValueError, match="residual"):
        norm(x, residual=torch.randn(4, 6).half())
    with pytest.raises(ValueError, match="float tensor"):
        norm(torch.arange(6))
    with pytest.raises(ValueError, match="one dim"):
        norm(torch.tensor(1.0))
    with pytest.raises(ValueError, match="on meta"):
        norm(x, torch.randn(6, device="meta"))


def test_rows_too_wide_for_the_kernels_are_declined() -> None:
    x = torch.empty(1, 20000, device="meta")
    with pytest.raises(fk.BackendError, match="16384"):
        fk.rms_norm(x, backend="triton")


def test_an_outlier_does_not_spoil_the_variance() -> None:
    """Half-precision LayerNorm measures from a few samples: one of them as far off as a value can be."""
    x = 0.01 * torch.randn(1, MIN_SHIFTED_WIDTH, generator=torch.Generator().manual_seed(0)).half()
    x[0, 0] = 1000.0
    expected = fk.layer_norm(x.double(), backend="reference")
    torch.testing.assert_close(fk.layer_norm(x, backend="triton").double(), expected, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("version", [(3, 6), (3, 9)])
def test_wide_rows_for_every_version_of_triton(version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3.9 on the backward kernel computes what it normalized twice, for want of registers."""
    monkeypatch.setattr("flashkernel.ops.norm.triton.triton_version", lambda: version)
    x, weight, dy = torch.randn(3, 8200), torch.randn(8200), torch.randn(3, 8200)
    found = []
    for backend in ("triton", "reference"):
        leaves = [one.clone().requires_grad_() for one in (x, weight)]
        fk.layer_norm(*leaves, backend=backend).backward(dy)
        found.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*found)
