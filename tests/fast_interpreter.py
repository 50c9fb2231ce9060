"""Triton's interpreter at twice the speed: the same arithmetic and the same checks, without work that is repeated.

Triton 3.6 patches its language modules anew for every call of a device function, rebuilds the type of a tensor (and
the tuple of its shape, and that tuple's type) for every operation, and computes for every integer operation whether it
overflows, which nothing reads; a reduction with a combine function of its own calls that function for every element.
Here the modules stay patched, types are kept by element type and shape, and elements are combined in pairs. `install()`
does nothing with other versions of Triton, which then run as they are.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

VERSIONS = ("3.6.",)


def install() -> bool:
    """Speed up the interpreter of this process; returns whether it did."""
    import triton

    if not triton.__version__.startswith(VERSIONS):
        return False
    _keep_language_patched()
    _keep_types()
    _keep_numpy_dtypes()
    _broadcast_only_what_differs()
    _drop_unread_overflow_checks()
    _combine_halves()
    return True


def _keep_language_patched() -> None:
    """Patch the language modules once, where the interpreter does it for every kernel and for every call of a device
    function, and undoes some of it behind a kernel."""
    import triton.language as tl
    import triton.language.core as core
    from triton.runtime import interpreter

    checked = core.builtin(lambda: None).__code__  # raises without `_semantic`, which is always given here
    semantic = interpreter.interpreter_semantic

    def patch_attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if member.__code__ is checked else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    class Kept:
        def restore(self) -> None:
            pass

    kept = Kept()
    interpreter._patch_attr = patch_attribute
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    interpreter._patch_lang = lambda fn: kept


def _keep_types() -> None:
    """A block type is made once per element type and shape; a tuple finds its type when it is asked for it."""
    import triton.language.core as core

    make_tuple = core._type_for_tuple_values
    make_block = core.block_type.__init__
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    scalar_shape, scalar_numel = core.tuple([]), core.constexpr(1)

    def tuple_init(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def tuple_type(self: Any) -> Any:
        found = self.__dict__.get("_type")
        if found is None:
            found = self.__dict__["_type"] = make_tuple(self.values)
        return found

    def set_tuple_type(self: Any, type: Any) -> None:
        self.__dict__["_type"] = type

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        space = getattr(element_ty, "address_space", None)  # of a pointer, whose name does not tell it
        sizes = shape.value if isinstance(shape, core.constexpr) else shape
        key = (element_ty.name, space, *[size.value if isinstance(size, core.constexpr) else size for size in sizes])
        found = blocks.get(key)
        if found is None:
            make_block(self, element_ty, shape)
            self.tensor_shape = core.tuple([core.constexpr(size) for size in self.shape])
            self.tensor_numel = core.constexpr(self.numel)
            blocks[key] = dict(self.__dict__)
        else:
            self.__dict__.update(found)

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        if isinstance(type, core.block_type):
            self.shape, self.numel = type.tensor_shape, type.tensor_numel
        else:
            self.shape, self.numel = scalar_shape, scalar_numel

    core.tuple.__init__ = tuple_init
    core.tuple.type = property(tuple_type, set_tuple_type)
    core.block_type.__init__ = block_init
    core.tensor.__init__ = tensor_init


def _keep_numpy_dtypes() -> None:
    """The NumPy dtype of a type, looked up by its name."""
    import triton.language as tl
    from triton.runtime import interpreter

    find = interpreter._get_np_dtype
    kept: dict[str, Any] = {}

    def numpy_dtype(type: Any) -> Any:
        scalar = type.element_ty if isinstance(type, tl.block_type) else type
        found = kept.get(scalar.name)
        if found is None:
            found = kept[scalar.name] = find(type)
        return found

    interpreter._get_np_dtype = numpy_dtype


def _broadcast_only_what_differs() -> None:
    """Tensors of one shape are ready for a binary operation."""
    import triton.language.core as core
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value

    def compatible(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = isinstance(lhs.type, core.block_type), isinstance(rhs.type, core.block_type)
        if blocks == (False, False) or (blocks == (True, True) and lhs.type.shape.values == rhs.type.shape.values):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = compatible


def _drop_unread_overflow_checks() -> None:
    """The interpreter computes whether an integer operation overflows, and asserts it only with its option `debug`,
    which is off."""
    from triton.language.semantic import TritonSemantic

    compute = TritonSemantic.binary_op_sanitize_overflow_impl

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            compute(self, lhs, rhs, binary_op)

    TritonSemantic.binary_op_sanitize_overflow_impl = check


def _combine_halves() -> None:
    """tl.reduce combines neighbors, then the results, as compiled kernels do: one call for each halving."""
    import numpy as np
    from triton.runtime.interpreter import ReduceOps

    def generic_reduce(self: Any, given: Any) -> list[Any]:
        flat = self.axis is None
        dtypes = [one.dtype for one in given]
        parts = [one.handle.data.reshape(-1) if flat else one.handle.data for one in given]
        axis, dims = (0, given[0].handle.data.ndim) if flat else (self.axis, 1)
        while parts[0].shape[axis] > 1:
            sides = []
            for first in (0, 1):
                index = (slice(None),) * axis + (slice(first, None, 2),)
                sides += [self.to_tensor(part[index], dtype) for part, dtype in zip(parts, dtypes)]
            combined = self.combine_fn.fn(*sides)
            combined = combined if isinstance(combined, tuple) else (combined,)
            parts = [one.handle.data for one in combined]
        if self.keep_dims:
            parts = [part.reshape((1,) * dims) for part in parts] if flat else parts
        else:
            parts = [np.squeeze(part, axis) for part in parts]
        return [self.to_tensor(part, dtype) for part, dtype in zip(parts, dtypes)]

    ReduceOps.generic_reduce = generic_reduce
