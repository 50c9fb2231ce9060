"""Groups of the linear layer's kernel arguments: the launcher fills them in, the kernels read them by name."""

from typing import Any, NamedTuple


class LinearInput(NamedTuple):
    """What is multiplied with the weights."""

    x: Any  # [rows, inner], unit stride along inner
    norm_weight: Any  # [inner], of RMSNorm; None: x is not normalized


class LinearOutput(NamedTuple):
    """What the epilogue reads and writes, [rows, outputs] with unit stride along the outputs."""

    residual: Any  # or None
    y: Any


class OutputStrides(NamedTuple):
    """Strides of the biases, and of the rows of `LinearOutput`; 0 for what there is none of."""

    bias: Any
    residual: Any
    y: Any


class StreamKMemory(NamedTuple):
    """Memory for tiles that several programs share; None where each has its own."""

    workspace: Any  # float32: two partial tiles per program
    counters: Any  # int32: of each tile the programs that have stored their part


class NormScalars(NamedTuple):
    """Numbers of RMSNorm: x * rsqrt(mean(x^2) + eps) * (norm_weight + offset)."""

    eps: Any
    offset: Any


class LinearTraits(NamedTuple):
    """What both kernels are compiled for."""

    EPILOGUE: str
    GATED: bool  # the weights are gate and up
    NORM: bool
    SCALED: bool  # finished sums are multiplied by the weights' scales


class WeightLayout(NamedTuple):
    """How the weights are stored."""

    TRANSPOSED: bool  # (in, out)
    FORMAT: str  # that elements are dequantized from; "" if they are not
    ZEROS: bool  # there are zero points
    GROUP: int  # columns that share a scale; 0: all


class LinearTile(NamedTuple):
    """The tile of a program."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    FULL_K: bool  # BLOCK_K divides the inner dimension
    NUM_STAGES: int
