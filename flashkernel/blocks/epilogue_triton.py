"""The device code of an epilogue: the chain that a text describes, composed when the kernel is compiled.

The text is that of `epilogue.Epilogue`: pieces between semicolons, each a name and its constants. Nothing here knows
how a kernel tiles its product, so that any kernel with a float32 tile in registers can end with `apply_epilogue`.
"""

import triton
import triton.language as tl

from flashkernel.blocks.activation_triton import activate, clamp_gate, clamp_up
from flashkernel.blocks.dropout_triton import keep_elements, seed_word


@triton.constexpr_function
def _pieces(chain):
    return len(chain.split(";")) if chain else 0


@triton.constexpr_function
def _word(chain, piece, out_column):
    return chain.split(";")[piece].split()[out_column]


@triton.constexpr_function
def _number(chain, piece, out_column):
    return float(chain.split(";")[piece].split()[out_column])


@triton.constexpr_function
def _integer(chain, piece, out_column):
    return int(chain.split(";")[piece].split()[out_column])


@triton.jit
def drop_elements(value, seed, device_seed, row, column, columns, EPILOGUE: tl.constexpr, PIECE: tl.constexpr):
    """Dropout of value [R, C] by a piece of a chain. Elements are numbered row * columns + column.

    It follows from `seed`, a `seed_word`, or from the number at `device_seed`.
    """
    index = row.to(tl.int64)[:, None] * columns + column[None, :]
    kept = keep_elements(seed_word(seed, device_seed), index, _integer(EPILOGUE, PIECE, 2))
    return tl.where(kept, value * (1.0 / (1.0 - _number(EPILOGUE, PIECE, 1))), 0.0)


@triton.jit
def apply_epilogue(
    value, up, row, column, out_column, in_rows, in_columns,
    bias, up_bias, bias_stride, residual, residual_stride, EPILOGUE: tl.constexpr,
    seed=None, device_seed=None, first_row=0, columns=0,
):  # fmt: skip
    """The chain applied to value [R, C] in float32.

    `up` [R, C] is the up product where the chain has a gate; else it is not looked at. `row` [R] and `column` [C]
    say where the tile lies in the residual, `out_column` [C] where its columns lie in the bias. With dropout
    (`drop_elements`), elements are numbered (first_row + row) * columns + column.
    """
    for piece in tl.static_range(_pieces(EPILOGUE)):
        if _word(EPILOGUE, piece, 0) == "bias":
            value += tl.load(bias + out_column * bias_stride, mask=in_columns, other=0.0).to(tl.float32)[None, :]
            up += tl.load(up_bias + out_column * bias_stride, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        elif _word(EPILOGUE, piece, 0) == "activation":
            value, _ = activate(value, _word(EPILOGUE, piece, 1), 0.0)
        elif _word(EPILOGUE, piece, 0) == "gate":
            gate = clamp_gate(value, _number(EPILOGUE, piece, 3), _word(EPILOGUE, piece, 1))
            value, _ = activate(gate, _word(EPILOGUE, piece, 1), _number(EPILOGUE, piece, 2))
            value *= clamp_up(up, _number(EPILOGUE, piece, 3), _word(EPILOGUE, piece, 1))
        elif _word(EPILOGUE, piece, 0) == "scale":
            value *= _number(EPILOGUE, piece, 1)
        elif _word(EPILOGUE, piece, 0) == "dropout":
            value = drop_elements(value, seed, device_seed, first_row + row, column, columns, EPILOGUE, piece)
        else:
            tl.static_assert(_word(EPILOGUE, piece, 0) == "residual", "unknown piece of an epilogue")
            there = residual + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
            value += tl.load(there, mask=in_rows[:, None] & in_columns[None, :], other=0.0).to(tl.float32)
    return value


@triton.jit
def block_scale(value, in_columns):
    """[R]: the scale with which the largest |value| of each row of a tile [R, C] becomes 448; 1 where all are zero."""
    largest = tl.max(tl.where(in_columns[None, :], tl.abs(value), 0.0), axis=1)
    smallest: tl.constexpr = 1.1754943508222875e-38  # a quotient that rounds to 0 would divide by it
    return tl.where(largest > 0, tl.maximum(largest / 448.0, smallest), 1.0)


@triton.jit
def saturate_fp8(value):
    """value within the range of float8_e4m3fn; keeps NaN."""
    return tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))


@triton.jit
def pull_back_activation(gradient, z, up, EPILOGUE: tl.constexpr):
    """(activation(z), dz, dup) of a chain that is one activation or gate, where `gradient` is that of its value.

    All are [R, C] in float32. Without a gate `up` is not looked at, and dup is dz.
    """
    KIND: tl.constexpr = _word(EPILOGUE, 0, 1)
    if _word(EPILOGUE, 0, 0) == "gate":
        limit: tl.constexpr = _number(EPILOGUE, 0, 3)
        value, derivative = activate(clamp_gate(z, limit, KIND), KIND, _number(EPILOGUE, 0, 2))
        factor = clamp_up(up, limit, KIND)
        dz, dup = gradient * derivative * factor, gradient * value
        if KIND == "gpt_oss":
            dz = tl.where(z > limit, 0.0, dz)
            dup = tl.where((up > limit) | (up < -limit), 0.0, dup)
        return value * factor, dz, dup
    else:
        tl.static_assert(_word(EPILOGUE, 0, 0) == "activation", "an activation or a gate has a gradient")
        value, derivative = activate(z, KIND, 0.0)
        return value, gradient * derivative, gradient * derivative
