"""Kernels in a chain: the next one takes its seats, and has its weights brought to L2, while the one before still runs.

From sm_90 on a kernel may be launched before its predecessor ends (`launch_pdl`, see core/launch.py's `chained`). Every
program of it must call `join_chain` before it reads what others wrote, and before it writes. L2 is where all
multiprocessors meet, so lines fetched into it are never stale: `fetch_line` may come before.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE = tl.constexpr(128)  # bytes that one fetch brings


@triton.jit
def join_chain():
    """All that was launched before is done and seen; the next kernel may take the seats that become free."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def fetch_line(pointers):
    """Start bringing the lines that hold these addresses to L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
