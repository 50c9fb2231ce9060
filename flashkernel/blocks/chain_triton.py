"""Kernels in a chain: the next one takes its seats while the one before still runs.

From sm_90 on a kernel may be launched before its predecessor ends (`launch_pdl`, see core/launch.py's `chained`). Every
program of it must call `join_chain` before it reads or writes anything, and before it ends.
"""

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def join_chain():
    """All that was launched before is done and seen; the next kernel may take the seats that become free."""
    gdc_wait()
    gdc_launch_dependents()
