"""Kernels in a chain: the next one takes its seats, and has its weights brought to L2, while the one before still runs.

From sm_90 on a kernel may be launched before its predecessor ends (`launch_pdl`, see core/launch.py's `chained`). Every
program of it must call `join_chain` before it reads what others wrote, and before it writes. L2 is where all
multiprocessors meet, so what is fetched into it is never stale: `fetch_rows` may come before.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def join_chain():
    """All that was launched before is done and seen; the next kernel may take the seats that become free."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def fetch_rows(first, rows, stride, size, WARPS: tl.constexpr):
    """Start bringing `rows` rows of `size` bytes to L2, `stride` bytes apart, of which `first` points to the first.

    All are multiples of 16. The first thread of each warp asks for every WARPS-th row.
    """
    tl.inline_asm_elementwise(
        """{
            .reg .pred out;
            .reg .u32 thread, lane, row;
            .reg .u64 place;
            mov.u32 thread, %tid.x;
            and.b32 lane, thread, 31;
            shr.u32 row, thread, 5;
            setp.ne.u32 out, lane, 0;
            @out bra done;
        next:
            setp.ge.u32 out, row, $2;
            @out bra done;
            mad.wide.u32 place, row, $3, $1;
            cp.async.bulk.prefetch.L2.global [place], $4;
            add.u32 row, row, $5;
            bra next;
        done:
            mov.b32 $0, 0;
        }""",
        "=r,l,r,r,r,r", [first, rows, stride, size, WARPS], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
