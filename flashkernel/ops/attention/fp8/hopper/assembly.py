"""Inline PTX of the FP8 kernel, for what Gluon cannot express. Each works on several elements of a thread at once."""

from flashkernel.core.gluon import gl

# Converts four float32 to four e4m3 in one register. `.to` unpacks and repacks the bytes, at twice the cost.
FOUR_TO_E4M3 = gl.constexpr(
    "{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
    "mov.b32 $0, {low, high};}"
)

_PACK = 8  # elements of a thread that one statement works on
_EXP2_SFU = "fma.rn.f32 x, {s}, {scale}, {shift}; ex2.approx.ftz.f32 {result}, x; "
# 2^x for x = s * scale + shift <= 127 by FMAs: y = (x + 127) / 254 saturates to 0 for x < -127; t has round(x) in its
# lowest bits; the fraction f, at most 1/2, goes through a polynomial with an error of at most 2.8e-6; round(x) is added
# to its exponent. A masked score, x = -inf, becomes 1 * 2^-127, whose bits are all zero.
_EXP2_FMA = (
    "fma.rn.sat.f32 y, {s}, {small_scale}, {small_shift}; fma.rn.f32 t, y, 0f437E0000, 0f4B3FFF81; "
    "sub.rn.f32 r, 0f4B3FFF81, t; fma.rn.f32 f, y, 0f437E0000, r; "
    "fma.rn.f32 z, f, 0f3C1D016B, 0f3D64FE26; fma.rn.f32 z, z, f, 0f3E7601BC; fma.rn.f32 z, z, f, 0f3F317096; "
    "fma.rn.f32 z, z, f, 0f3F800000; "
    "mov.b32 n, t; shl.b32 n, n, 23; mov.b32 m, z; add.s32 m, m, n; mov.b32 {result}, m; "
)


def _exp2(by_polynomial: int) -> str:
    """Returns PTX for 2^(s * scale + shift) of 8 elements, `by_polynomial` of them by FMAs, evenly spread."""
    lines = []
    for element in range(_PACK):
        names = ("result", "s", "scale", "shift", "small_scale", "small_shift")
        operands = {name: f"${_PACK * row + element}" for row, name in enumerate(names)}
        use_fma = (element + 1) * by_polynomial // _PACK > element * by_polynomial // _PACK
        lines.append((_EXP2_FMA if use_fma else _EXP2_SFU).format(**operands))
    return "{.reg .f32 x, y, t, r, f, z; .reg .b32 n, m; " + "".join(lines) + "}"


EXP2 = gl.constexpr(tuple(_exp2(by_polynomial) for by_polynomial in range(_PACK + 1)))
EXP2_CONSTRAINTS = gl.constexpr(",".join(["=f"] * _PACK + ["f"] * 5 * _PACK))


def _rescale(elements: int) -> str:
    """Returns PTX that multiplies a thread's `elements` of two rows (two of the one, two of the other, and so on), each
    by its row's factor. A warp jumps over the products if the factor is 1 for all its rows."""
    copies = "".join(f"mov.f32 ${i}, ${elements + i}; " for i in range(elements))
    products = "".join(f"mul.rn.f32 ${i}, ${i}, ${2 * elements + i}; " for i in range(elements))
    factors = f"${2 * elements}", f"${2 * elements + 2}"
    return (
        "{.reg .pred changed, any; "
        f"setp.neu.f32 changed, {factors[0]}, 0f3F800000; setp.neu.or.f32 changed, {factors[1]}, 0f3F800000, changed; "
        f"vote.sync.any.pred any, changed, 0xffffffff; {copies}@!any bra.uni same; {products}same: }}"
    )


RESCALE = gl.constexpr({columns: _rescale(columns // 2) for columns in (64, 128)})
RESCALE_CONSTRAINTS = gl.constexpr({n: ",".join(["=f"] * (n // 2) + ["f"] * n) for n in (64, 128)})
