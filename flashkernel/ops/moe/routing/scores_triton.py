"""Device code of routers: logits, keys in whose order experts are chosen, and weights."""

import triton
import triton.language as tl

from flashkernel.blocks.softmax_triton import LOG2E

TAKEN = tl.constexpr(-(2**31))  # the key of an expert that was chosen already
OUTSIDE = tl.constexpr(-(2**31) + 1)  # of one that may not be chosen


@triton.jit
def ordered(score):
    """Integers in the order of float32 scores; NaN as -inf, which is above OUTSIDE."""
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-LOG2E * x))


@triton.jit
def first_best(key, column):
    """The column of the largest key of each row [T]; of equal ones the first."""
    best = tl.max(key, 1)
    return tl.min(tl.where(key == best[:, None], column[None, :], 2147483647), 1)


@triton.jit
def load_logits(logits, noise, token, column, inside, logit_strides, noise_strides):
    """Logits with their noise [T, E] in float32; -inf outside."""
    offset = token.to(tl.int64)[:, None] * logit_strides[0] + column[None, :] * logit_strides[1]
    value = tl.load(logits + offset, mask=inside, other=float("-inf")).to(tl.float32)
    if noise is not None:
        offset = token.to(tl.int64)[:, None] * noise_strides[0] + column[None, :] * noise_strides[1]
        value += tl.load(noise + offset, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def probabilities(value, inside):
    """softmax over the experts of each token [T, E]."""
    p = tl.where(inside, tl.exp2((value - tl.max(value, 1)[:, None]) * LOG2E), 0.0)
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def selected_softmax(value, selected):
    """softmax over the selected experts of each token [T, E]; 0 elsewhere."""
    top = tl.max(tl.where(selected, value, float("-inf")), 1)
    p = tl.where(selected, tl.exp2((value - top[:, None]) * LOG2E), 0.0)
    return tl.where(selected, p / tl.sum(p, 1)[:, None], 0.0)


@triton.jit
def dense_weights(value, selected, inside, scale, KIND: tl.constexpr, NORMALIZE: tl.constexpr):
    """Weights of the selected experts [T, E]; 0 elsewhere, NaN for tokens with a NaN logit."""
    if KIND == "sigmoid":
        weight = tl.where(selected, sigmoid(value), 0.0)
        if NORMALIZE:
            weight = weight / (tl.sum(weight, 1)[:, None] + 1e-20)
    elif NORMALIZE:
        weight = selected_softmax(value, selected)
    else:
        weight = tl.where(selected, probabilities(value, inside), 0.0)
    broken = tl.max((inside & (value != value)).to(tl.int32), 1)[:, None] > 0
    return tl.where(broken & selected, float("nan"), weight * scale)


@triton.jit
def taken_groups(key, column, size, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr):
    """Whether the group of each expert is one of the token's best [T, E]; columns behind the last group are not."""
    group = column // size
    quality = tl.full(key.shape, float("-inf"), tl.float32)
    for index in tl.range(0, GROUPS):
        mine = (group == index)[None, :]
        inside = tl.where(mine, key, float("-inf"))
        total = tl.max(inside, 1)
        if BEST_TWO:
            first = tl.min(tl.where(mine & (inside == total[:, None]), column[None, :], 2147483647), 1)
            total += tl.max(tl.where(column[None, :] == first[:, None], float("-inf"), inside), 1)
        quality = tl.where(mine, total[:, None], quality)
    rank = tl.where((group < GROUPS)[None, :], ordered(quality), TAKEN)
    taken = tl.zeros(key.shape, tl.int1)
    for _ in tl.range(0, TOP_GROUPS):
        best = first_best(rank, column) // size
        mine = group[None, :] == best[:, None]
        taken |= mine
        rank = tl.where(mine, TAKEN, rank)
    return taken
