"""What happens to a matrix product before it is stored, as data.

An `Epilogue` is a chain of small frozen pieces, applied in order to a product [rows, columns] (to a pair of products,
gate and up, as long as the chain has a `Gate` ahead). Torch runs the chain, a backward pass pulls gradients back
through it, and `apply_epilogue` in epilogue_triton.py applies the same chain to a tile in registers, from its text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernel.blocks.activation import NATIVE, apply_gate
from flashkernel.blocks.dropout import threshold
from flashkernel.core.arguments import check_finite, static

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "squared_relu")
# The public names of gates, and the activation that each puts on its gate.
GATES = {"swiglu": "silu", "geglu": "gelu_tanh", "geglu_exact": "gelu", "reglu": "relu", "gpt_oss_glu": "gpt_oss"}

Values = tuple[Tensor, ...]  # one product, or gate and up


@dataclass(frozen=True)
class Operands:
    """The tensors that pieces read: biases [columns], one for each product, a residual [rows, columns], and which
    elements dropout keeps, bool [rows, columns]."""

    biases: tuple[Tensor, ...] = ()
    residual: Tensor | None = None
    kept: Tensor | None = None


class _Addition:
    """A piece that adds a tensor."""

    def pull_back(self, values: Values, gradients: Values, operands: Operands) -> Values:
        return gradients


@dataclass(frozen=True)
class Bias(_Addition):
    """value + bias[column]"""

    text = "bias"

    def run(self, values: Values, operands: Operands) -> Values:
        return tuple([value + bias for value, bias in zip(values, operands.biases)])


class _Argument:
    """A piece that callers give as an argument."""

    @property
    def text(self) -> str:
        raise NotImplementedError

    @property
    def cache_key(self) -> str:
        """Tells calls apart (core/replay.py)."""
        return self.text


@dataclass(frozen=True)
class Activation(_Argument):
    """activation(value)"""

    kind: str

    @property
    def text(self) -> str:
        return f"activation {self.kind}"

    def run(self, values: Values, operands: Operands) -> Values:
        return (NATIVE[self.kind](values[0]),)

    def pull_back(self, values: Values, gradients: Values, operands: Operands) -> Values:
        return (gradients[0] * _value_and_derivative(self.kind, values[0])[1],)


@dataclass(frozen=True)
class Gate(_Argument):
    """activation(gate) * up. The kind "gpt_oss" is (min(gate, limit) sigmoid(alpha gate)) (clamp(up) + 1)."""

    kind: str
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def text(self) -> str:
        return f"gate {self.kind} {float(static(self.alpha))!r} {float(static(self.limit))!r}"

    def run(self, values: Values, operands: Operands) -> Values:
        gate, up = values
        return (apply_gate(NATIVE, self.kind, gate, up, self.alpha, self.limit),)

    def pull_back(self, values: Values, gradients: Values, operands: Operands) -> Values:
        gate, up = values
        if self.kind != "gpt_oss":
            value, derivative = _value_and_derivative(self.kind, gate)
            return gradients[0] * derivative * up, gradients[0] * value
        clamped_gate, clamped_up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        share = torch.sigmoid(self.alpha * clamped_gate)
        derivative = share * (1 + self.alpha * clamped_gate * (1 - share))
        dgate = gradients[0] * derivative * (clamped_up + 1) * (gate <= self.limit)
        return dgate, gradients[0] * clamped_gate * share * (clamped_up == up)


@dataclass(frozen=True)
class Scale:
    """value * factor"""

    factor: float

    @property
    def text(self) -> str:
        return f"scale {float(static(self.factor))!r}"

    def run(self, values: Values, operands: Operands) -> Values:
        return (values[0] * self.factor,)

    def pull_back(self, values: Values, gradients: Values, operands: Operands) -> Values:
        return (gradients[0] * self.factor,)


@dataclass(frozen=True)
class Dropout:
    """value / (1 - probability) where it is kept, else 0"""

    probability: float

    @property
    def text(self) -> str:
        probability = float(static(self.probability))
        return f"dropout {probability!r} {threshold(probability)}"

    def run(self, values: Values, operands: Operands) -> Values:
        assert operands.kept is not None, "the chain has dropout, and nothing says what is kept"
        return (torch.where(operands.kept, values[0] / (1 - self.probability), 0.0),)

    def pull_back(self, values: Values, gradients: Values, operands: Operands) -> Values:
        return self.run(gradients, operands)


@dataclass(frozen=True)
class Residual(_Addition):
    """value + residual[row, column]"""

    text = "residual"

    def run(self, values: Values, operands: Operands) -> Values:
        assert operands.residual is not None, "the chain has a residual, and none was given"
        return (values[0] + operands.residual,)


Piece = Bias | Activation | Gate | Scale | Dropout | Residual


@dataclass(frozen=True)
class Epilogue:
    """A chain of pieces. `text` names it, for operators and kernels, and `parse` finds it again."""

    pieces: tuple[Piece, ...] = ()

    @property
    def text(self) -> str:
        return ";".join([piece.text for piece in self.pieces])

    @property
    def gated(self) -> bool:
        return any(isinstance(piece, Gate) for piece in self.pieces)

    @property
    def linear(self) -> bool:
        """Whether the result is a factor times the product, plus what does not depend on it."""
        return not any(isinstance(piece, (Activation, Gate, Dropout)) for piece in self.pieces)

    @property
    def factor(self) -> float:
        """What a linear chain multiplies its product by."""
        return math.prod(piece.factor for piece in self.pieces if isinstance(piece, Scale))

    @property
    def activation(self) -> Activation | Gate | None:
        """Its activation or gate."""
        return next((piece for piece in self.pieces if isinstance(piece, (Activation, Gate))), None)

    @property
    def dropout(self) -> Dropout | None:
        """Its dropout."""
        return next((piece for piece in self.pieces if isinstance(piece, Dropout)), None)

    @property
    def before_activation(self) -> Epilogue:
        """What gives the preactivation: the bias, with which a chain begins."""
        return Epilogue(self.pieces[: self._first_after])

    @property
    def from_activation(self) -> Epilogue:
        """The pieces that `before_activation` leaves."""
        return Epilogue(self.pieces[self._first_after :])

    @property
    def around_activation(self) -> tuple[str, str]:
        """The texts of `before_activation` and `from_activation`."""
        return self.before_activation.text, self.from_activation.text

    @property
    def _first_after(self) -> int:
        return sum(isinstance(piece, Bias) for piece in self.pieces)

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> Epilogue:
        return Epilogue(tuple(_piece(words) for words in text.split(";")) if text else ())

    def run(self, products: Values, operands: Operands) -> Tensor:
        """The result, in the precision of the products."""
        return self.values(products, operands)[0]

    def values(self, products: Values, operands: Operands) -> Values:
        """As `run`; gate and up for a part of a chain that ends ahead of its gate."""
        values = products
        for piece in self.pieces:
            values = piece.run(values, operands)
        return values

    def pull_back(self, products: Values, operands: Operands, gradient: Tensor) -> tuple[Values, Values, Tensor]:
        """Gradients of the products, of the values at the bias (sum their rows) and of the residual, in float32."""
        values, before = tuple(product.float() for product in products), []
        for piece in self.pieces:
            before.append(values)
            values = piece.run(values, operands)
        gradients: Values = (gradient.float(),)
        at_bias, at_residual = gradients, gradient
        for piece, given in zip(reversed(self.pieces), reversed(before)):
            if isinstance(piece, Residual):
                at_residual = gradients[0]
            gradients = piece.pull_back(given, gradients, operands)
            if isinstance(piece, Bias):
                at_bias = gradients
        return gradients, at_bias, at_residual


def standard(
    bias: bool, activation: str | Activation | Gate | None, scale: float, residual: bool, dropout: float = 0.0
) -> tuple[Piece, ...]:
    """The pieces of a transformer's layer, in its order: bias, activation or gate, scale, dropout, residual."""
    pieces: list[Piece] = []
    if bias:
        pieces.append(Bias())
    piece = activation_piece(activation)
    if piece is not None:
        pieces.append(piece)
    if scale != 1.0:
        pieces.append(Scale(scale))
    if dropout > 0:
        pieces.append(Dropout(dropout))
    if residual:
        pieces.append(Residual())
    return tuple(pieces)


def activation_piece(activation: str | Activation | Gate | None) -> Activation | Gate | None:
    """The piece that a public name stands for; a piece stands for itself."""
    if not isinstance(activation, str):
        return activation
    return Gate(GATES[activation]) if activation in GATES else Activation(activation)


def activation_width(activation: str | Activation | Gate | None) -> int:
    """The products that an activation takes: 2, gate and up, or 1."""
    return 2 if isinstance(activation_piece(activation), Gate) else 1


def check_activation(function: str, activation: str | Activation | Gate | None) -> None:
    """ValueError for an activation that does not exist, or a gate whose constants are not numbers for it."""
    known, given = [*ACTIVATIONS, *GATES], activation
    if isinstance(activation, (Activation, Gate)):
        known = [*ACTIVATIONS, "gpt_oss"] if isinstance(activation, Gate) else [*ACTIVATIONS]
        given = activation.kind
        if isinstance(activation, Gate):
            check_finite(function, "the gate's alpha", activation.alpha)
            if not activation.limit >= 0:
                raise ValueError(f"{function}: the gate's limit is {activation.limit}; the clamp needs at least 0")
    if given is not None and given not in known:
        raise ValueError(f"{function}: activation is {given!r}; it must be one of {', '.join(known)}")


def _piece(text: str) -> Piece:
    name, *words = text.split()
    if name == "activation":
        return Activation(words[0])
    if name == "gate":
        return Gate(words[0], float(words[1]), float(words[2]))
    if name == "scale":
        return Scale(float(words[0]))
    if name == "dropout":
        return Dropout(float(words[0]))
    if name == "bias":
        return Bias()
    if name == "residual":
        return Residual()
    raise ValueError(f"{text!r} is no piece of an epilogue")


def _value_and_derivative(kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """An activation and its derivative."""
    if kind == "relu":
        return F.relu(x), (x > 0).to(x.dtype)
    if kind == "squared_relu":
        positive = F.relu(x)
        return positive.square(), 2 * positive
    if kind == "silu":
        share = torch.sigmoid(x)
        return x * share, share * (1 + x * (1 - share))
    if kind == "gelu_tanh":
        root = math.sqrt(2 / math.pi)
        tanh_x = torch.tanh(root * (x + 0.044715 * x**3))
        derivative = 0.5 * (1 + tanh_x) + 0.5 * x * (1 - tanh_x.square()) * root * (1 + 3 * 0.044715 * x.square())
        return 0.5 * x * (1 + tanh_x), derivative
    below = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    return x * below, below + x * torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
