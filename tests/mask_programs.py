"""Random functions of (b, h, q, k), each as a tree that is built with operators and computed by plain Python."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import flashkernel as fk
from flashkernel.blocks import expression as ex

Tree = tuple[Any, ...]
SIZES = (2, 2, 13, 11)  # batch, heads, queries, keys
_DRAW = torch.Generator().manual_seed(0)


def _halves(*shape: int) -> Tensor:
    """Multiples of a half, which every float type holds exactly."""
    return torch.randint(-9, 10, shape, generator=_DRAW) / 2


def _whole(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=_DRAW)


TABLES: dict[str, Tensor] = {  # some are shorter than the sequence: reads outside give 0
    "bool_k": _whole(0, 2, 11).bool(),
    "bool_qk": _whole(0, 2, 13, 11).bool(),
    "uint8_bq": _whole(0, 256, 2, 13).to(torch.uint8),
    "int8_k": _whole(-128, 128, 9).to(torch.int8),
    "int16_q": _whole(-300, 300, 13).to(torch.int16),
    "int32_hk": _whole(-9, 10, 2, 11).to(torch.int32),
    "int64_q": _whole(-9, 10, 10),
    "half_k": _halves(11).half(),
    "bfloat_q": _halves(13).bfloat16(),
    "float_hq": _halves(2, 13),
    "double_k": _halves(11).double(),
}
_VALUES = {name: table.tolist() for name, table in TABLES.items()}
_KINDS = {
    name: "condition" if table.dtype == torch.bool else "float" if table.is_floating_point() else "integer"
    for name, table in TABLES.items()
}
_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "/": operator.truediv, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne, "&": operator.and_, "|": operator.or_, "^": operator.xor, "neg": operator.neg,
    "abs": abs,
}  # fmt: skip
_BUILT = {**_OPERATORS, "~": operator.invert, "where": fk.where, "min": ex.minimum, "max": ex.maximum}
_PLAIN = {**_OPERATORS, "~": operator.not_, "where": lambda c, a, b: a if c else b, "min": min, "max": max}


def _evaluate(tree: Tree, values: dict[str, Any], read: Callable[..., Any], operate: Callable[..., Any]) -> Any:
    """The tree over `values`: read(table, indices) at tables, operate(name, operands) at operators."""
    name, *args = tree
    if name == "constant":
        return args[0]
    if name == "index":
        return values[args[0]]
    given = [_evaluate(arg, values, read, operate) for arg in (args[1:] if name == "table" else args)]
    return read(args[0], given) if name == "table" else operate(name, given)


def build(tree: Tree, values: dict[str, Any]) -> Any:
    """The tree over variables, as a user would write it."""
    return _evaluate(tree, values, lambda name, indices: fk.Table(TABLES[name])[tuple(indices)], _build_operation)


def _build_operation(name: str, given: list[Any]) -> Any:
    if not any(isinstance(one, ex.Expression) for one in given):  # Python would compute by itself
        given[0] = ex.lift(given[0])
    return _BUILT[name](*given)


def plain(tree: Tree, values: dict[str, int]) -> Any:
    """The tree over numbers, by Python."""
    return _evaluate(tree, values, _read_plain, lambda name, given: _PLAIN[name](*given))


def _read_plain(name: str, indices: list[int]) -> Any:
    found = _VALUES[name]
    for index in indices:
        if isinstance(found, list):
            found = found[index] if 0 <= index < len(found) else 0
    return bool(found) if _KINDS[name] == "condition" else found


def expected(tree: Tree, sizes: tuple[int, int, int, int] = SIZES) -> Tensor:
    """[batch, heads, queries, keys], pair by pair."""
    batch, heads, queries, keys = sizes
    return torch.tensor(
        [[[[bool(plain(tree, {"b": b, "h": h, "q": q, "k": k})) for k in range(keys)] for q in range(queries)]
          for h in range(heads)] for b in range(batch)]
    )  # fmt: skip


def mask_of(tree: Tree) -> fk.Mask:
    return fk.custom(lambda b, h, q, k: build(tree, {"b": b, "h": h, "q": q, "k": k}))


def _varies(tree: Tree) -> bool:
    return tree[0] == "index" or any(isinstance(arg, tuple) and _varies(arg) for arg in tree[1:])


def _indices(name: str, integers: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    """Of numbers without a shape Triton's interpreter compares integers only: some index varies."""
    integers = integers.filter(_varies)
    own = [st.just(("index", axis)) for axis in name.split("_")[1]]
    return st.one_of(st.tuples(*own), st.tuples(*(st.one_of(one, integers) for one in own))).map(
        lambda indices: ("table", name, *indices)
    )


def _tables(kind: str, integers: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.sampled_from([name for name in TABLES if _KINDS[name] == kind]).flatmap(
        lambda name: _indices(name, integers)
    )


_INDEX = st.sampled_from(["b", "h", "q", "k", "q", "k"]).map(lambda name: ("index", name))
_SMALL = st.integers(-6, 6).map(lambda value: ("constant", value))
_DIVISOR = st.integers(1, 9).map(lambda value: ("constant", value))
_POWER = st.sampled_from([2.0, 4.0, 0.5]).map(lambda value: ("constant", value))


def integers(depth: int) -> st.SearchStrategy[Tree]:
    leaf = st.one_of(_INDEX, _INDEX, _SMALL)
    if depth == 0:
        return leaf
    deeper, truth = integers(depth - 1), conditions(depth - 1)
    return st.one_of(
        leaf,
        _tables("integer", deeper),
        st.tuples(st.sampled_from(["+", "-", "min", "max", "&", "|"]), deeper, deeper),
        st.tuples(st.just("-"), _INDEX, _INDEX),
        st.tuples(st.just("*"), _SMALL, deeper),
        st.tuples(st.sampled_from(["//", "%"]), deeper, _DIVISOR),
        st.tuples(st.sampled_from(["//", "%"]), st.tuples(st.just("-"), _INDEX, _INDEX), _DIVISOR),
        st.tuples(st.sampled_from(["neg", "abs"]), deeper),
        st.tuples(st.just("where"), truth, deeper, deeper),
        st.tuples(st.sampled_from(["+", "-"]), truth, truth),  # a condition counts as 1 or 0
    )


def numbers(depth: int) -> st.SearchStrategy[Tree]:
    whole = integers(depth)
    if depth == 0:
        return st.one_of(whole, _POWER)
    deeper = numbers(depth - 1)
    return st.one_of(
        whole,
        whole,
        _tables("float", integers(depth - 1)),
        st.tuples(st.just("/"), deeper, _POWER),
        st.tuples(st.sampled_from(["+", "-", "min", "max"]), deeper, deeper),
        st.tuples(st.sampled_from(["neg", "abs"]), deeper),
    )


_FAR = st.sampled_from([float("inf"), float("-inf"), float("nan")]).map(lambda value: ("constant", value))


def conditions(depth: int) -> st.SearchStrategy[Tree]:
    compare = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
    if depth == 0:
        return st.tuples(compare, _INDEX, st.one_of(_INDEX, _SMALL))
    deeper = conditions(depth - 1)
    return st.one_of(
        st.tuples(compare, numbers(depth - 1), numbers(depth - 1)),
        st.tuples(compare, numbers(depth - 1), _FAR),
        _tables("condition", integers(depth - 1)),
        st.tuples(st.sampled_from(["&", "|", "^", "==", "!=", "<", "<=", "min", "max"]), deeper, deeper),
        st.tuples(
            st.just("=="), deeper, st.sampled_from([0, 1, True, False, 2]).map(lambda value: ("constant", value))
        ),
        st.tuples(st.sampled_from(["&", "|"]), deeper, st.booleans().map(lambda value: ("constant", value))),
        st.tuples(st.just("~"), deeper),
        st.tuples(st.just("where"), deeper, deeper, deeper),
    )
