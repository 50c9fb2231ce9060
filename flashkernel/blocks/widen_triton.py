"""Half-precision values that are used before and after a reduction stay in half precision in between."""

import triton
import triton.language as tl


@triton.jit
def widen_again(x):
    """Converts x to float32 a second time, by other instructions than `.to`.

    With a second `.to` the compiler would reuse the first result and keep float32 values in registers in between. That
    takes twice the registers and halves the rows that an SM has in flight.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)
