"""Shape buckets of the Hopper launch configs: shapes in one bucket share a config."""

from __future__ import annotations

from collections.abc import Mapping

from flashkernel.core.tune import head_block as block
from flashkernel.core.tune import power_of_2

SHORT_CONTEXT, MEDIUM_CONTEXT = 384, 1024  # keys that a tile of queries sees
BARRIER_BYTES = 1024  # of shared memory, for mbarriers and alignment


def bucket(shape: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the bucket of a shape (`config_shape`): lengths and head dims rounded up to powers of two."""
    return (
        power_of_2(shape["seqlen_q"]), power_of_2(shape["seqlen_k"]), power_of_2(shape["mean_visible_keys"]),
        block(shape["head_dim"]), block(shape["value_dim"]), shape["group_size"], shape["fixed_max"], shape["masked"],
        shape["has_tables"],
    )  # fmt: skip
