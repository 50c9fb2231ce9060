"""Programmatic dependent launch (PDL): the next kernel's programs become resident while this one drains.

From sm_90 on a kernel may be launched before its predecessor ends (`launch_pdl`, core/launch.py's `pdl_options`). Every
program of it must call `pdl_enter` before it reads or writes global memory, and before it ends.
"""

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pdl_enter():
    """Wait until all earlier kernels have completed and their writes are visible, then let the next kernel launch."""
    gdc_wait()
    gdc_launch_dependents()
