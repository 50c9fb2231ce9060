"""Launch configs of the norm kernels: rows per tile, warps, programs per SM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashkernel.core.device import Device
from flashkernel.core.tune import Tunable, power_of_2

MAX_HELD_WIDTH = 8192  # columns up to which the backward kernel holds the weight in registers
MIN_SHIFTED_WIDTH = 8192  # columns from which LayerNorm's sums are worth taking in one reduction
PREFETCH_VALUES = 16  # values a thread up to which the forward kernel fetches the weight before it reduces the row
SHORT = 1024  # columns of rows so short that a program is over before its loads could be of use to another
MAX_WIDTH = 16384  # a whole row, and its part of the weight gradient, live in registers


@dataclass(frozen=True)
class ForwardConfig:
    """A tile of whole rows."""

    rows: int
    num_warps: int


@dataclass(frozen=True)
class BackwardConfig:
    """Persistent programs, `programs_per_sm` on each SM, that loop over the rows."""

    rows: int
    num_warps: int
    programs_per_sm: int
    num_stages: int  # rows in flight per program: the copies of later rows overlap this one's arithmetic


@dataclass(frozen=True)
class ColumnSumConfig:
    """A tile of a column sum."""

    rows: int
    block: int
    num_warps: int


def _bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    return (
        power_of_2(shape["rows"]), power_of_2(shape["width"]), shape.get("bytes", 4), shape.get("streams", 0),
        shape.get("sums", 0),
    )  # fmt: skip


def _forward_heuristic(device: Device, shape: Mapping[str, int]) -> ForwardConfig:
    width, count = power_of_2(shape["width"]), power_of_2(shape["rows"])
    if count < 16 * device.sms:
        # Too few rows to keep the GPU busy: what counts is how soon one row is done, so 16 values a thread, or 32
        # where rows are short enough for a warp, which needs no barrier.
        most = 32 if count < device.sms else max(4, width // 2048)
        values = 512 if width > SHORT or count < device.sms else 1024  # of a warp
        return ForwardConfig(max(1, min(512 // width, count)), min(most, max(1, width // values)))
    # Many rows: up to 8 warps, so that few meet at a barrier; a wide row gives each much to have in flight.
    rows = max(1, min(2048 // width, count))
    values = 512 if width == 4096 and shape["sums"] == 1 else 1024  # of a warp
    if width == SHORT and rows == 2 and shape["sums"] == 1:
        values = 512
    return ForwardConfig(rows, min(8, max(1, rows * width // values)))


def streaming(device: Device, bytes_moved: int, width: int) -> tuple[bool, bool]:
    """Whether (what is read, what is written) should leave the L2 cache at once.

    Both where it would hold about half of them, and the wrong half; short rows are read so, whatever their number.
    """
    half = device.l2_bytes / 2 < bytes_moved < 2 * device.l2_bytes
    return half or width <= SHORT, half or (width <= SHORT and bytes_moved > device.l2_bytes)


def _forward_space(device: Device, shape: Mapping[str, int]) -> Iterator[ForwardConfig]:
    for rows in (1, 2, 4, 8, 16):
        for num_warps in (1, 2, 4, 8, 16, 32):
            yield ForwardConfig(rows, num_warps)


def _forward_valid(config: ForwardConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    elements = config.rows * power_of_2(shape["width"]) / (32 * config.num_warps)
    return None if elements <= 128 else f"{elements:.0f} values a thread do not fit its registers"


def _backward_heuristic(device: Device, shape: Mapping[str, int]) -> BackwardConfig:
    width, count = power_of_2(shape["width"]), power_of_2(shape["rows"])
    pair = 2 if device.arch >= 80 else 1  # rows in flight; without asynchronous copies they sit in registers
    rows = max(1, min(2048 // width if width < 1024 else 8192 // width, 16 if width < 1024 else pair, count))
    num_warps = min(32, max(4, rows * width // (1024 if width <= 4096 else 512)))
    # Few rows: every program's partial weight gradient costs as much as a row, so one program per SM.
    programs_per_sm = 1 if count < 64 * device.sms else max(1, min(3, 8192 // (rows * width)))
    copies = (3, 2) if device.arch >= 80 else ()  # asynchronous copies into shared memory came with sm_80
    num_stages = next(
        (
            num_stages
            for num_stages in copies
            if _fits(BackwardConfig(rows, num_warps, programs_per_sm, num_stages), device, shape)
        ),
        1,
    )
    return BackwardConfig(rows, num_warps, programs_per_sm, num_stages)


def _fits(config: BackwardConfig, device: Device, shape: Mapping[str, int]) -> bool:
    """Whether the rows in flight fit in shared memory, beside what the sums need."""
    tile = config.rows * power_of_2(shape["width"]) * shape["bytes"]
    return (config.num_stages - 1) * tile * shape["streams"] * config.programs_per_sm <= 0.9 * device.shared_per_sm


def _backward_space(device: Device, shape: Mapping[str, int]) -> Iterator[BackwardConfig]:
    for rows in (1, 2, 4):
        for num_warps in (4, 8, 16, 32):
            for programs_per_sm in (1, 2, 3, 4, 6, 8):
                for num_stages in (1, 2, 3, 4):
                    yield BackwardConfig(rows, num_warps, programs_per_sm, num_stages)


def _backward_valid(config: BackwardConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    if device.threads_per_sm and config.programs_per_sm * config.num_warps * 32 > device.threads_per_sm:
        return f"{config.programs_per_sm} programs of {config.num_warps} num_warps do not fit a SM at once"
    if device.shared_per_sm and not _fits(config, device, shape):
        return f"{config.num_stages} num_stages of {config.rows} rows do not fit in shared memory"
    elements = config.rows * power_of_2(shape["width"]) / (32 * config.num_warps)
    return None if elements <= 64 else f"{elements:.0f} values a thread do not fit its registers"


def _columns_heuristic(device: Device, shape: Mapping[str, int]) -> ColumnSumConfig:
    return ColumnSumConfig(rows=min(64, power_of_2(shape["rows"])), block=32, num_warps=4)


def _columns_space(device: Device, shape: Mapping[str, int]) -> Iterator[ColumnSumConfig]:
    for rows in (16, 32, 64, 128):
        for block in (16, 32, 64, 128):
            for num_warps in (2, 4, 8):
                yield ColumnSumConfig(rows, block, num_warps)


def _columns_valid(config: ColumnSumConfig, device: Device, shape: Mapping[str, int]) -> str | None:
    elements = config.rows * config.block / (32 * config.num_warps)
    return None if elements <= 128 else f"{elements:.0f} values a thread do not fit its registers"


FORWARD = Tunable("norm_forward", ForwardConfig, _forward_heuristic, _forward_space, _forward_valid, _bucket)
BACKWARD = Tunable("norm_backward", BackwardConfig, _backward_heuristic, _backward_space, _backward_valid, _bucket)
COLUMN_SUM = Tunable("norm_column_sum", ColumnSumConfig, _columns_heuristic, _columns_space, _columns_valid, _bucket)
