"""An epilogue as CUDA C++: the steps that blocks/cuda/epilogue.cuh applies to an output."""

from __future__ import annotations

import math

from flashkernel.blocks.epilogue import Activation, Bias, Epilogue, Gate, Piece, Residual, Scale


def cuda_steps(chain: str) -> str:
    """The steps of an epilogue's text, for the macro EPILOGUE.

    Example:
        >>> cuda_steps("bias;activation gelu;scale 0.5;residual")
        'output.bias(); output.activation<GELU>(); output.scale(0.5f); output.residual();'
    """
    return " ".join(f"output.{_step(piece)};" for piece in Epilogue.parse(chain).pieces)


def _step(piece: Piece) -> str:
    if isinstance(piece, Bias):
        return "bias()"
    if isinstance(piece, Activation):
        return f"activation<{piece.kind.upper()}>()"
    if isinstance(piece, Gate):
        return f"gate<{piece.kind.upper()}>({_literal(piece.alpha)}, {_literal(piece.limit)})"
    if isinstance(piece, Scale):
        return f"scale({_literal(piece.factor)})"
    assert isinstance(piece, Residual)
    return "residual()"


def _literal(value: float) -> str:
    """A float32 constant; a gate's limit may be infinite."""
    if math.isinf(value):
        return "__int_as_float(0x7f800000)" if value > 0 else "__int_as_float(0xff800000)"
    return f"{float(value)!r}f"
