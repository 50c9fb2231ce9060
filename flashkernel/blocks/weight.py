"""What a matrix product multiplies by: `Weight`, and the formats it may be stored in.

A format is registered once (`register_format`): how its tensors become a matrix, how a matrix becomes its tensors, and
which kernels read them as they are. Callers (linear layers, model loaders, the engine, `hf`) handle a `Weight` and name
no format, so a new format changes none of them. The library's own formats are in `blocks/weight_formats`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from flashkernel.blocks.fp8 import FP8, SCALE_BLOCK, expand_scales, quantize_fp8_groups
from flashkernel.blocks.integers import quantize_int8_groups
from flashkernel.blocks.values import has_values
from flashkernel.core.arguments import check_written

# (rows, columns) of the matrix that share a scale; -1: all of them.
GRANULARITIES = {"tensor": (-1, -1), "row": (1, -1), "group": (1, SCALE_BLOCK), "block": (SCALE_BLOCK, SCALE_BLOCK)}
MIN_ACTIVATION_GROUP = 32  # columns of x that share a scale at least, where x is rounded to integers
_NAMES = {shape: name for name, shape in GRANULARITIES.items()}


@dataclass(frozen=True, eq=False, repr=False)
class Weight:
    """The matrix (out, in) that a linear layer multiplies by, in one of several formats.

    Formats are "plain" (float32, float16 or bfloat16), "fp8" (float8_e4m3fn), "fp8_e5m2", "int8", "int4" (two to a
    byte) and "mxfp4", these three also in tiles for Hopper (`tiled`), and GGUF's "q4_1", "q4_k" and "q6_k". Element
    (i, j) of a quantized matrix is (q[i, j] - zeros[g]) * scales[g], where q are the stored values, g = (i // rows,
    j // columns) and group_shape is (rows, columns); GGUF's formats have minima or scales of scales. The exact layouts
    are in the docstrings of `flashkernel.blocks.weight_formats`.
    `flashkernel.linear` takes a Weight wherever it takes a tensor. A quantized Weight is frozen: gradients go through
    it to x, and it has none. torch.compile, torch.utils._pytree and state dicts (`WeightBuffers` in
    `blocks/weight_module.py`) see its tensors.

    Args:
        data: The stored elements, (out, in), or (experts, out, in) for a stack of matrices; "int4" and "mxfp4" have
            in / 2 bytes in a row.
        scales: (out / rows, in / columns) rounded up, with the stack's dim before; float32, of "mxfp4" uint8 (powers of
            two, biased by 127). None for "plain".
        zeros: Zero points of asymmetric "int8" and "int4", of the scales' shape; the minima of "q4_1"; None otherwise.
        format: Name of a registered format.
        group_shape: Rows and columns of the matrix that share a scale; -1 stands for all.
        activation_dtype: What x is rounded to before the product: float8_e4m3fn for "fp8" and "mxfp4", int8 for
            formats of integers and "mxfp4". It has a scale for each row, or for the columns of a group (32 at least of
            integers, 128 of floats) if group_shape has such groups. None keeps x as it is.

    Returns:
        A Weight, which checks that its tensors fit together. `Weight.quantize` makes one from a matrix, `Weight.pack`
        from the tensors of a checkpoint.

    Example:
        >>> import torch, flashkernel as fk
        >>> matrix = torch.randn(6, 8)
        >>> weight = fk.Weight.quantize(matrix, "fp8", granularity="row")
        >>> weight
        Weight(fp8 row, 6x8, 72 bytes)
        >>> x = torch.randn(2, 8)
        >>> torch.allclose(fk.linear(x, weight), x @ weight.dequantize(torch.float32).T, atol=1e-5)
        True
        >>> (weight.dequantize(torch.float32) - matrix).abs().max() < 0.07 * matrix.abs().max()
        tensor(True)
    """

    data: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    format: str = "plain"
    group_shape: tuple[int, int] = (-1, -1)
    activation_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        error = format_named(self.format).error(self)
        if error is not None:
            raise ValueError(f"Weight: {error}")

    @staticmethod
    def quantize(
        tensor: Tensor,
        format: str = "fp8",
        granularity: str | None = None,
        activation_dtype: torch.dtype | None = None,
        symmetric: bool = True,
    ) -> Weight:
        """Returns a matrix in another format; values are rounded to nearest, and no gradient goes back to them.

        Args:
            tensor: (out, in), or (experts, out, in); float32, float16 or bfloat16, and finite.
            format: Name of the format.
            granularity: What shares a scale: "tensor", "row" (of outputs), "group" (a row's 128 columns), "block"
                (128x128), or a size such as "1x64". None: what suits the format, "row" for those of 8 bits, "1x32" for
                "mxfp4", and for "int4" the widest of "1x128", "1x64", "1x32" and "row" that divides a row.
            activation_dtype: As in `Weight`.
            symmetric: False gives zero points to "int8" and "int4", for values that are not centered at 0.
        """
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2 or tensor.ndim < 2:
            raise ValueError(
                f"Weight.quantize: the tensor is {tensor.dtype} {tuple(tensor.shape)}; it must be a float matrix "
                "(out, in) or a stack of them"
            )
        if has_values(tensor) and not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            raise ValueError(
                f"Weight.quantize: {count} of {tensor.numel()} elements are infinite or NaN; the matrix is damaged"
            )
        chosen = format_named(format)
        group = chosen.default_group(tensor.shape[-1]) if granularity is None else group_shape_of(granularity)
        found = chosen.quantize(tensor.detach(), group, symmetric)
        return found if activation_dtype is None else replace(found, activation_dtype=activation_dtype)

    @staticmethod
    def pack(data: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None, format: str = "plain") -> Weight:
        """Returns the Weight of tensors as a checkpoint stores them; what shares a scale follows from their shapes.

        Args:
            data: The elements.
            scales: One, one for each row (out) or (out, 1), or one for each group or block of 128; for "int8", "int4"
                and "mxfp4" one for each group of any size that divides a row.
            zeros: Zero points, of the scales' shape, or None.
            format: Name of the format.
        """
        return format_named(format).pack(data, scales, zeros)

    @staticmethod
    def concatenate(weights: Sequence[Weight]) -> Weight:
        """Returns the rows of several `weights` of one format in one, as q, k and v are stored for one product.

        Args:
            weights: Each (out, in), of one format and one in.
        """
        first = weights[0]
        if any(one.format != first.format or one.activation_dtype != first.activation_dtype for one in weights):
            raise ValueError(f"Weight.concatenate: {', '.join(map(repr, weights))} have different formats")
        return first if len(weights) == 1 else _FORMATS[first.format].concatenate(weights)

    @staticmethod
    def stack(weights: Sequence[Weight]) -> Weight:
        """Returns a stack (experts, out, in) of `weights` of one layout.

        Args:
            weights: Each (out, in), of one layout and shape.
        """
        first = weights[0]
        if any(one.layout != first.layout or one.shape != first.shape for one in weights):
            raise ValueError(f"Weight.stack: {', '.join(map(repr, weights))} have different layouts")
        lists = zip(*[(one.data, one.scales, one.zeros) for one in weights])
        return first._with([None if given[0] is None else torch.stack(given) for given in lists])

    @property
    def shape(self) -> torch.Size:
        """(out, in) of the matrix, with the stack's dim before."""
        return _FORMATS[self.format].shape(self.data)

    @property
    def ndim(self) -> int:
        """2, or 3 for a stack."""
        return self.data.ndim

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `data`."""
        return self.data.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors there are: data, scales, zeros."""
        return tuple([one for one in (self.data, self.scales, self.zeros) if one is not None])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum([one.nbytes for one in self.tensors])

    @property
    def layout(self) -> str:
        """All but the tensors, as text: `explain` prints it, and `from_tensors` reads it."""
        if self.format == "plain":
            return "plain"
        text = f"{self.format} {_NAMES.get(self.group_shape) or f'{self.group_shape[0]}x{self.group_shape[1]}'}"
        text += "" if self.zeros is None else " zeros"
        return text if self.activation_dtype is None else f"{text} x:{_dtype_name(self.activation_dtype)}"

    @staticmethod
    def from_tensors(tensors: Sequence[Tensor], layout: str) -> Weight:
        """Returns the Weight of such `tensors` and such a `layout`: the inverse of those two properties.

        Args:
            tensors: As the property `tensors` gives them.
            layout: As the property `layout` gives it.
        """
        return _rebuilt(list(tensors), Layout.parse(layout))

    @property
    def cache_parts(self) -> tuple[Any, ...]:
        """What a launch cache's key and its tensors are made of (core/replay.py)."""
        return (self.format, self.group_shape, self.activation_dtype, self.data, self.scales, self.zeros)

    @property
    def activation_group(self) -> tuple[int, int]:
        """(rows, columns) of x that share a scale where x is rounded; -1 stands for all columns."""
        columns = self.group_shape[1]
        if self.activation_dtype == FP8:  # floats have exponents of their own
            return 1, columns if columns >= SCALE_BLOCK else -1
        return 1, columns if columns == -1 else max(columns, MIN_ACTIVATION_GROUP)

    def take(self, indices: Tensor) -> Weight:
        """Returns the rows of the matrix that `indices` (int64) name, as an embedding's lookup takes them.

        Args:
            indices: int64 of any shape, rows of the matrix.
        """
        if self.group_shape[0] != 1 or self.ndim != 2:
            raise ValueError(f"Weight.take: {self!r} has no scales of its own for each row")
        flat = indices.reshape(-1)
        return self._with(
            [one if one is None else one.index_select(0, flat) for one in (self.data, self.scales, self.zeros)]
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix as a tensor in `dtype`, computed in float32 (in float64 for that) and rounded once.

        Args:
            dtype: Of the result: a floating-point dtype.
        """
        return _FORMATS[self.format].dequantize(self, dtype)

    def rows(self, rows: slice) -> Weight:
        """Returns some rows of the matrix, that is outputs of the layer: a view of the data. `rows` is a slice.

        Args:
            rows: A slice without a step: which outputs.
        """
        return _FORMATS[self.format].rows(self, rows)

    def tiled(self) -> Weight:
        """Returns the matrix in the order that Hopper's kernels read (formats "int4_tiles", "int8_tiles" and
        "mxfp4_tiles", of "int4", "int8" and "mxfp4"): the same values, but for scales rounded to float16. ValueError if
        it has no such order: rows and columns are multiples of 64."""
        return tiles.tiled_format(self).tiled(self)

    def to(self, device: torch.device | str | int) -> Weight:
        """Returns the Weight on another `device`. Its tensors keep their dtypes, which are those of its format.

        Args:
            device: The device of the result.
        """
        if not isinstance(device, (torch.device, str, int)):
            raise TypeError(
                f"Weight.to: {device!r} is no device; {self!r} keeps its format: dequantize() gives a matrix in a dtype"
            )
        return self._with([one if one is None else one.to(device) for one in (self.data, self.scales, self.zeros)])

    def __getitem__(self, index: int) -> Weight:
        if self.data.ndim < 3:
            raise IndexError(f"Weight: {self!r} is one matrix; only a stack of them can be indexed")
        return self._with([one if one is None else one[index] for one in (self.data, self.scales, self.zeros)])

    def __len__(self) -> int:
        return self.shape[0]

    def _with(self, tensors: Sequence[Any]) -> Weight:
        """Other tensors of the same layout."""
        return assembled(tensors, (self.format, self.group_shape, self.activation_dtype))

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"Weight({self.layout if self.format != 'plain' else _dtype_name(self.dtype)}, {size}, {_size(self)})"


class Layout(NamedTuple):
    """What `Weight.layout` says."""

    format: str
    group_shape: tuple[int, int] = (-1, -1)
    zeros: bool = False
    activation_dtype: torch.dtype | None = None

    @staticmethod
    def parse(text: str) -> Layout:
        return _parse(text)


@lru_cache(maxsize=256)
def _parse(text: str) -> Layout:
    name, *rest = text.split(" ")
    if not rest:
        return Layout(name)
    group = group_shape_of(rest[0])
    dtypes = [getattr(torch, one[2:]) for one in rest if one.startswith("x:")]
    return Layout(name, group, "zeros" in rest, dtypes[0] if dtypes else None)


def group_shape_of(granularity: str) -> tuple[int, int]:
    """(rows, columns) that share a scale, from a name ("row") or a size ("1x64"); ValueError for anything else."""
    if not isinstance(granularity, str):
        raise TypeError(f"Weight: granularity is {granularity!r}; it must be a name or a size such as '1x64'")
    if granularity in GRANULARITIES:
        return GRANULARITIES[granularity]
    rows, _, columns = granularity.partition("x")
    if not all(size == "-1" or (size.isdecimal() and int(size)) for size in (rows, columns)):
        raise ValueError(
            f"Weight: granularity is {granularity!r}; it must be one of {', '.join(GRANULARITIES)}, or rows and "
            "columns such as 1x64"
        )
    return int(rows), int(columns)


def layouts(weights: Sequence[Any]) -> str:
    """The different layouts of a call's weights: "int8 row", or "int8 row and plain"."""
    found: list[str] = []
    for weight in weights:
        layout = weight.layout if isinstance(weight, Weight) else "plain"
        if layout not in found:
            found.append(layout)
    return " and ".join(found)


def scales_shape(shape: Sequence[int], granularity: str) -> tuple[int, ...]:
    """The shape of a matrix's scales, of which each group has one; its last rows and columns may be a smaller group."""
    groups = GRANULARITIES[granularity]
    return tuple(1 if each == -1 else -(-size // each) for size, each in zip(shape, groups))


def _rebuilt(tensors: list[Tensor], layout: Layout) -> Weight:
    scales = tensors[1] if len(tensors) > 1 else None
    zeros = tensors[2] if layout.zeros else None
    return Weight(tensors[0], scales, zeros, layout.format, layout.group_shape, layout.activation_dtype)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(weight: Weight) -> str:
    count = weight.nbytes
    return f"{count} bytes" if count < 1e6 else f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"


def assembled(tensors: Sequence[Any], context: Sequence[Any]) -> Weight:
    """A Weight of data, scales and zeros, and of its other fields; unchecked, because torch's pytrees hold things that
    are no tensors."""
    made = object.__new__(Weight)
    names = ("data", "scales", "zeros", "format", "group_shape", "activation_dtype")
    for name, value in zip(names, (*tensors, *context)):
        object.__setattr__(made, name, value)
    return made


def _flatten(weight: Weight) -> tuple[list[Any], Any]:
    given = (weight.data, weight.scales, weight.zeros)
    present = tuple(one is not None for one in given)
    context = (weight.format, weight.group_shape, weight.activation_dtype)
    return [one for one in given if one is not None], (present, context)


def _unflatten(tensors: Any, layout: Any) -> Weight:
    (present, context), left = layout, iter(tensors)
    return assembled([next(left) if there else None for there in present], context)


pytree.register_pytree_node(Weight, _flatten, _unflatten, serialized_type_name="flashkernel.Weight")


class WeightFormat(Protocol):
    """What a format defines. `register_format` makes it known; no caller of `linear` changes."""

    name: str

    def shape(self, data: Tensor) -> torch.Size:
        """The matrix's shape, which packed data does not have."""

    def error(self, weight: Weight) -> str | None:
        """What is wrong with a Weight's tensors; None if they fit."""

    def dequantize(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """The matrix in `dtype`."""

    def default_group(self, columns: int) -> tuple[int, int]:
        """What shares a scale in a matrix of so many columns, where nothing else is asked for."""

    def quantize(self, tensor: Tensor, group_shape: tuple[int, int], symmetric: bool) -> Weight:
        """A matrix in this format. ValueError if its groups or zero points are not those of the format."""

    def pack(self, data: Tensor, scales: Tensor | None, zeros: Tensor | None) -> Weight:
        """A checkpoint's tensors in the layout that kernels read."""

    def rows(self, weight: Weight, rows: slice) -> Weight:
        """Some rows of the matrix."""

    def concatenate(self, weights: Sequence[Weight]) -> Weight:
        """The rows of all matrices."""

    def declines(self, backend: str, layout: Layout) -> str | None:
        """Why the kernels of a backend do not read the format; None if they do. "torch" and "reference" always do."""


_FORMATS: dict[str, WeightFormat] = {}


def register_format(format: WeightFormat) -> None:
    """Makes a format known by its name."""
    _FORMATS[format.name] = format


def format_named(name: str) -> WeightFormat:
    """The format of a name; ValueError if there is none."""
    if name not in _FORMATS:
        raise ValueError(f"Weight: there is no format {name!r}; there are {', '.join(_FORMATS)}")
    return _FORMATS[name]


def rounded_activations(x: Tensor, weight: Weight) -> Tensor:
    """Returns x (..., in) as it is after rounding to the weight's activation_dtype, in x's dtype.

    The gradient goes through as if nothing was rounded (straight-through).
    """
    if weight.activation_dtype is None or x.numel() == 0:
        return x
    group = weight.activation_group
    flat = x.detach().reshape(-1, x.shape[-1])
    quantize = quantize_int8_groups if weight.activation_dtype == torch.int8 else quantize_fp8_groups
    data, scales = quantize(flat, group)
    wide = torch.promote_types(x.dtype, torch.float32)
    rounded = (data.to(wide) * expand_scales(scales.to(wide), group, flat.shape)).to(x.dtype).view(x.shape)
    return rounded + (x - x.detach())  # the difference is 0, and has x's gradient


def check_main_grads(function: str, main_grads: Sequence[Tensor], weights: Sequence[Tensor | Weight]) -> None:
    """ValueError unless there is a buffer for the gradient of each weight, in float32 or the weight's dtype."""
    if torch.compiler.is_compiling():
        raise ValueError(f"{function}: main_grads works in eager mode; leave it out under torch.compile")
    if len(main_grads) != len(weights):
        raise ValueError(
            f"{function}: {len(main_grads)} main_grads were given for {len(weights)} weights; give each weight one"
        )
    for buffer, weight in zip(main_grads, weights):
        if isinstance(weight, Weight):
            raise ValueError(f"{function}: {weight!r} is quantized and has no gradient; leave main_grads out")
        fits = buffer.shape == weight.shape and buffer.device == weight.device and not buffer.requires_grad
        if not fits or buffer.dtype not in (torch.float32, weight.dtype):
            raise ValueError(
                f"{function}: a main_grad is {buffer.dtype} {tuple(buffer.shape)} on {buffer.device}; it must be "
                f"float32 or {weight.dtype}, {tuple(weight.shape)} on {weight.device}, and require no gradient"
            )
        check_written(function, "a main_grad", buffer, weight)


# Each registers itself; they need the names above.
from flashkernel.blocks.weight_formats import float8, gguf, int4, int8, mxfp4, plain, tiles  # noqa: E402, F401
