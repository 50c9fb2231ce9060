"""Half-precision values that are needed twice, before and after a reduction, held as they came."""

import triton
import triton.language as tl


@triton.jit
def widen_again(x):
    """float32 of what was widened by `.to` before, in another way: else the compiler holds the wide values meanwhile.

    That takes twice the registers, and halves how many rows a multiprocessor has in flight.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)
