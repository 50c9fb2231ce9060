"""Dense products with a name for every tensor, as a declaration wants them; pairs are put together here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashkernel.ops.matmul import api
from flashkernel.ops.matmul import reference as plain


def matmul(a: Tensor, b: Tensor, **given: Any) -> Any:
    """flashkernel.matmul of the pairs (b, up) and (bias, up_bias), where those are given.

    With `accumulate` the residual is `out` itself.
    """
    return gathered(api.matmul, a, b, given)


def reference(a: Tensor, b: Tensor, **given: Any) -> Any:
    """The reference, called alike."""
    return gathered(_into_out, a, b, given)


def gathered(function: Callable[..., Any], a: Tensor, b: Any, given: dict[str, Any]) -> Any:
    """A function of pairs, called with named tensors and options."""
    rest = {name: value for name, value in given.items() if name not in ("up", "up_bias", "accumulate")}
    if given.get("accumulate"):
        rest["residual"] = rest["out"]
    if "up" in given:
        b = (b, given["up"])
        if "bias" in given:
            rest["bias"] = (given["bias"], given["up_bias"])
    return function(a, b, **rest)


def matmul_dact(a: Tensor, b: Tensor, preactivation: Tensor, *, in_place: bool = False, **given: Any) -> Any:
    """flashkernel.matmul_dact; `in_place` writes dz over the preactivation."""
    return api.matmul_dact(a, b, preactivation, **(given | {"dz_out": preactivation} if in_place else given))


def reference_dact(a: Tensor, b: Tensor, preactivation: Tensor, *, in_place: bool = False, **given: Any) -> Any:
    """The reference, called alike."""
    return plain.matmul_dact(a, b, preactivation, **(given | {"dz_out": preactivation} if in_place else given))


def _into_out(a: Tensor, b: Any, *, out: Tensor | None = None, **given: Any) -> Any:
    """The reference, which makes new tensors, with its result written to `out`."""
    if out is None:
        return plain.matmul(a, b, **given)
    results = plain.matmul(a, b, **{"out_dtype": out.dtype, **given})
    return (out.copy_(results[0]), results[1]) if isinstance(results, tuple) else out.copy_(results)
