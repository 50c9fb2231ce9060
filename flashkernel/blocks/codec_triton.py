"""Eight-bit codes of values, in device code that every architecture runs: e4m3 floats and integers.

Triton converts to e4m3 from sm_89 on only; here the code is made of integer arithmetic, rounding to nearest even.
"""

import triton
import triton.language as tl


@triton.jit
def largest_bits(values):
    """The largest magnitude of each row of float32 values [ROWS, COLUMNS], as the float's bits: int32 [ROWS].

    The bits of magnitudes are ordered as these are, with NaN above infinity: a maximum of bits keeps a NaN.
    """
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def encode_e4m3(values):
    """The bytes of float32 values as e4m3 (torch.float8_e4m3fn): beyond 448 saturated, NaN kept."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal: 3 of 23 fraction bits stay, and the exponent's bias becomes 7 instead of 127.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6: multiples of 2^-9; adding 2^23 rounds to an integer, which is then in the low bits.
    small = (magnitude.to(tl.float32, bitcast=True) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.minimum(tl.where(magnitude < 0x3C800000, small, normal), 0x7E)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode_int8(values):
    """float32 values rounded to nearest even, as int8 within [-127, 127]."""
    rounded = (values + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no room for a fraction
    return tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8)
