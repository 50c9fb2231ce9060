"""Lines of PTX that Gluon has no words for: each says what a thread does with several of its elements at once."""

from flashkernel.core.gluon import gl

# Four float32 to four e4m3 in a register: `.to` takes them apart and together again, at twice the cost.
FOUR_TO_E4M3 = gl.constexpr(
    "{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
    "mov.b32 $0, {low, high};}"
)

_EIGHT = 8
_BY_UNIT = "fma.rn.f32 x, {s}, {factor}, {shift}; ex2.approx.ftz.f32 {power}, x; "
# 2^x for x = s factor + shift <= 127, on the units that multiply: y = (x + 127) / 254 is 0 where x is less than -127;
# t has round(x) in its lowest bits; the rest f, at most a half, goes through a polynomial that is off by 2.8e-6 at
# most; and round(x) is added to its exponent. What is masked, x = -inf, becomes 1 * 2^-127, whose bits are all zero.
_BY_POLYNOMIAL = (
    "fma.rn.sat.f32 y, {s}, {small_factor}, {small_shift}; fma.rn.f32 t, y, 0f437E0000, 0f4B3FFF81; "
    "sub.rn.f32 r, 0f4B3FFF81, t; fma.rn.f32 f, y, 0f437E0000, r; "
    "fma.rn.f32 z, f, 0f3C1D016B, 0f3D64FE26; fma.rn.f32 z, z, f, 0f3E7601BC; fma.rn.f32 z, z, f, 0f3F317096; "
    "fma.rn.f32 z, z, f, 0f3F800000; "
    "mov.b32 n, t; shl.b32 n, n, 23; mov.b32 m, z; add.s32 m, m, n; mov.b32 {power}, m; "
)


def _powers(by_polynomial: int) -> str:
    """2^(s factor + shift) of eight elements, some of them by the polynomial, evenly spread."""
    lines = []
    for place in range(_EIGHT):
        names = ("power", "s", "factor", "shift", "small_factor", "small_shift")
        operands = {name: f"${_EIGHT * row + place}" for row, name in enumerate(names)}
        chosen = (place + 1) * by_polynomial // _EIGHT > place * by_polynomial // _EIGHT
        lines.append((_BY_POLYNOMIAL if chosen else _BY_UNIT).format(**operands))
    return "{.reg .f32 x, y, t, r, f, z; .reg .b32 n, m; " + "".join(lines) + "}"


POWERS = gl.constexpr(tuple(_powers(count) for count in range(_EIGHT + 1)))
POWERS_OPERANDS = gl.constexpr(",".join(["=f"] * _EIGHT + ["f"] * 5 * _EIGHT))


def _rescaled(held: int) -> str:
    """`held` elements of two rows, in turn two of the one and two of the other, each times its row's number."""
    copies = "".join(f"mov.f32 ${place}, ${held + place}; " for place in range(held))
    products = "".join(f"mul.rn.f32 ${place}, ${place}, ${2 * held + place}; " for place in range(held))
    return (
        "{.reg .pred moved, any; "
        f"setp.neu.f32 moved, ${2 * held}, 0f3F800000; setp.neu.or.f32 moved, ${2 * held + 2}, 0f3F800000, moved; "
        f"vote.sync.any.pred any, moved, 0xffffffff; {copies}@!any bra.uni same; {products}same: }}"
    )


RESCALED = gl.constexpr({width: _rescaled(width // 2) for width in (64, 128)})
RESCALED_OPERANDS = gl.constexpr({w: ",".join(["=f"] * (w // 2) + ["f"] * w) for w in (64, 128)})
