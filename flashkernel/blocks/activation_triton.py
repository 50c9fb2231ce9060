"""The activations' device code: value and derivative of each kind in float32, and the clamps of gpt-oss's gate."""

import triton
import triton.language as tl

from flashkernel.blocks.softmax_triton import LOG2E


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-LOG2E * x))


@triton.jit
def _normal_tail(a):
    """P(Z > a) of a standard normal for a >= 0: 2^-p(a), where p is fitted to float32 accuracy on [0, 6]."""
    p = 2.01481498152134e-08 * a - 6.263879299694963e-07
    p = p * a + 8.360007996088825e-06
    p = p * a - 6.053904871805571e-05
    p = p * a + 2.2215439821593463e-04
    p = p * a + 1.2529618106782436e-04
    p = p * a - 7.107788696885109e-03
    p = p * a + 5.25551438331604e-02
    p = p * a + 4.591823220252991e-01
    p = p * a + 1.1511086225509644
    return tl.exp2(-1.0 - p * a)


@triton.jit
def activate(x, KIND: tl.constexpr, alpha):
    """(value, derivative) of the activation; what a kernel does not use is not computed."""
    if KIND == "relu":
        value = tl.where(x < 0, 0.0, x)  # keeps NaN
        derivative = tl.where(x > 0, 1.0, 0.0)
    elif KIND == "squared_relu":
        positive = tl.where(x < 0, 0.0, x)
        value = positive * positive
        derivative = 2.0 * positive
    elif KIND == "gelu":
        tail = _normal_tail(tl.abs(x))
        cdf = tl.where(x < 0, tail, 1.0 - tail)  # P(Z < x)
        value = x * cdf
        derivative = cdf + x * 0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x)
    elif KIND == "gelu_tanh":
        # (1 + tanh z) / 2 = sigmoid(2 z); 1 - sigmoid would cancel, and its factor is as large as x^3
        decay = tl.exp2(-LOG2E * x * (1.5957691216057308 + 0.07135481282938 * x * x))
        cdf = 1.0 / (1.0 + decay)
        tail = tl.where(decay > 1e30, 1.0, decay * cdf)
        value = x * cdf
        derivative = cdf + value * tail * (1.5957691216057308 + 0.21406443848814 * x * x)
    elif KIND == "silu":
        sigmoid = _sigmoid(x)
        value = x * sigmoid
        derivative = sigmoid + value * (1.0 - sigmoid)
    else:
        tl.static_assert(KIND == "gpt_oss", "unknown activation")
        sigmoid = _sigmoid(alpha * x)
        value = x * sigmoid
        derivative = sigmoid + alpha * value * (1.0 - sigmoid)
    return value, derivative


@triton.jit
def clamp_gate(gate, limit, KIND: tl.constexpr):
    return tl.where(gate > limit, limit, gate) if KIND == "gpt_oss" else gate


@triton.jit
def clamp_up(up, limit, KIND: tl.constexpr):
    return tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0 if KIND == "gpt_oss" else up
