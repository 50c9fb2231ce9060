// The part of the machine that is the same for all kernels.

#include "machine.h"

#include "machine/async_copies.cpp"
#include "machine/fibers.cpp"
#include "machine/matrices.cpp"
#include "machine/shared_memory.cpp"

#include "machine/bulk_copies.cpp"
#include "machine/warpgroup.cpp"

#include "machine/global_memory.cpp"
#include "machine/scheduler.cpp"

#include "machine/launch.cpp"
