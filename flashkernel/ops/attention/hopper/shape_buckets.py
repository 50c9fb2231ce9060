"""Shape buckets of the Hopper launch configs: shapes in one bucket share a config."""

from __future__ import annotations

from collections.abc import Mapping

from flashkernel.core.tune import head_block as block
from flashkernel.core.tune import power_of_2

SHORT_CONTEXT, MEDIUM_CONTEXT = 384, 1024  # keys that a tile of queries sees
BARRIER_BYTES = 1024  # of shared memory, for mbarriers and alignment


def bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the bucket of a shape (`config_shape`): lengths and head dims rounded up to powers of two, and the tails
    of heads between them."""
    return (
        power_of_2(shape["seqlen_q"]), power_of_2(shape["seqlen_k"]), power_of_2(shape["mean_visible_keys"]),
        block(shape["head_dim"]), block(shape["value_dim"]), shape["group_size"], shape["fixed_max"], shape["masked"],
        shape["has_tables"], *_tails(shape),
    )  # fmt: skip


def head_tail(width: int, split: bool = True) -> int:
    """Returns how many columns of a head lie behind the first half of its padded width, rounded up to a power of two
    (head_split.py); 0 if heads are not split, or two products would not multiply less than one."""
    half = block(width) // 2
    tail = max(16, power_of_2(width - half))  # a WGMMA has at least 16 columns
    return tail if split and half >= 64 and tail < half else 0


def _tails(shape: Mapping[str, int]) -> tuple[int, int]:
    return head_tail(shape["head_dim"]), head_tail(shape["value_dim"])


def can_split(shape: Mapping[str, int]) -> bool:
    """Returns whether splitting heads leaves out products."""
    return any(_tails(shape))


def no_split(shape: Mapping[str, int]) -> str:
    """Returns why a config with `split_heads` is not valid."""
    return f"heads of {shape['head_dim']} and {shape['value_dim']} have no padding that split_heads could leave out"
