"""Quantization to 8 bits on every architecture: e4m3 floats and int8.

Triton converts to e4m3 only from sm_89 on. These functions use integer arithmetic and round to nearest even.
"""

import triton
import triton.language as tl


@triton.jit
def largest_bits(values):
    """Returns the bits of the largest magnitude in each row of float32 values [ROWS, COLUMNS]: int32 [ROWS].

    The bits of magnitudes have the order of the magnitudes, with NaN above infinity, so the maximum keeps a NaN.
    """
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def encode_e4m3(values):
    """Returns float32 values as e4m3 bytes (torch.float8_e4m3fn); saturates at 448 and keeps NaN."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: keep 3 of 23 fraction bits; the exponent's bias changes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6: multiples of 2^-9. Adding 2^23 rounds to an integer and leaves it in the low bits.
    small = (magnitude.to(tl.float32, bitcast=True) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.minimum(tl.where(magnitude < 0x3C800000, small, normal), 0x7E)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode_int8(values):
    """Returns float32 values rounded to nearest even, as int8 in [-127, 127]."""
    rounded = (values + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no fraction bits
    return tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8)
