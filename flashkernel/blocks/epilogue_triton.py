"""The device code of an epilogue: the chain that a text describes, composed when the kernel is compiled.

The text is that of `epilogue.Epilogue`: pieces between semicolons, each a name and its constants. Nothing here knows
how a kernel tiles its product, so that any kernel with a float32 tile in registers can end with `finish`.
"""

import triton
import triton.language as tl

from flashkernel.blocks.activation_triton import activate, clamp_gate, clamp_up


@triton.constexpr_function
def _pieces(chain):
    return len(chain.split(";")) if chain else 0


@triton.constexpr_function
def _word(chain, piece, place):
    return chain.split(";")[piece].split()[place]


@triton.constexpr_function
def _number(chain, piece, place):
    return float(chain.split(";")[piece].split()[place])


@triton.jit
def finish(
    value, partner, row, column, place, in_rows, in_columns,
    bias, partner_bias, bias_stride, residual, residual_stride, CHAIN: tl.constexpr,
):  # fmt: skip
    """The chain applied to value [R, C] in float32.

    `partner` [R, C] is the up product where the chain has a gate; else it is not looked at. `row` [R] and `column` [C]
    say where the tile lies in the residual, `place` [C] where its columns lie in the bias.
    """
    for piece in tl.static_range(_pieces(CHAIN)):
        if _word(CHAIN, piece, 0) == "bias":
            value += tl.load(bias + place * bias_stride, mask=in_columns, other=0.0).to(tl.float32)[None, :]
            partner += tl.load(partner_bias + place * bias_stride, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        elif _word(CHAIN, piece, 0) == "activation":
            value, _ = activate(value, _word(CHAIN, piece, 1), 0.0)
        elif _word(CHAIN, piece, 0) == "gate":
            gate = clamp_gate(value, _number(CHAIN, piece, 3), _word(CHAIN, piece, 1))
            value, _ = activate(gate, _word(CHAIN, piece, 1), _number(CHAIN, piece, 2))
            value *= clamp_up(partner, _number(CHAIN, piece, 3), _word(CHAIN, piece, 1))
        elif _word(CHAIN, piece, 0) == "scale":
            value *= _number(CHAIN, piece, 1)
        else:
            tl.static_assert(_word(CHAIN, piece, 0) == "residual", "unknown piece of an epilogue")
            there = residual + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
            value += tl.load(there, mask=in_rows[:, None] & in_columns[None, :], other=0.0).to(tl.float32)
    return value
