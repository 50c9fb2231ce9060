"""The emulator of CUDA C++ kernels: its instructions compute what PTX says, and mistakes of a kernel do not pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cuda_emulator import FOLDER, EmulationError, emulated, unavailable

import flashkernel
from flashkernel.core import cuda
from flashkernel.core.cuda import Module

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

BLOCKS = Path(flashkernel.__file__).parent / "blocks" / "cuda"

# One block of two warps. Each kernel takes what a test passes; the wrong ones have one mistake each.
SOURCE = """
#include "ptx.cuh"

// out[i] = 64 threads' values in reverse: written and read by different warps. TAKE_OUT removes what makes it right.
template <bool BARRIER> __global__ void reverse(const float* x, float* out) {
    __shared__ float values[64];
    for (int step = 0; step < 2; ++step) {
        values[threadIdx.x] = x[threadIdx.x] + step;
        if (BARRIER) __syncthreads();
        out[64 * step + threadIdx.x] = values[63 - threadIdx.x];
        if (BARRIER) __syncthreads();
    }
}

__global__ void some_return(float* out) {
    if (threadIdx.x >= 40) return;
    __syncthreads();
    out[threadIdx.x] = 1.f;
}

__global__ void two_barriers(float* out) {
    if (threadIdx.x < 32) {
        out[threadIdx.x] = 1.f;
        __syncthreads();
    } else {
        __syncthreads();
    }
}

__global__ void half_a_warp_shuffles(float* out) {
    float value = threadIdx.x;
    if (threadIdx.x % 32 < 16) value = __shfl_xor_sync(0xffffffffu, value, 1);
    out[threadIdx.x] = value;
}

__global__ void shared_bytes(float* out, int index, int through_ptx) {
    extern __shared__ __align__(1024) float values[];
    if (through_ptx)
        store_shared(shared_address(values) + 4 * index, 0u);
    else
        values[index] = 0.f;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

__global__ void global_bytes(float* out, int index) { out[index] = 1.f; }

__global__ void two_at_once(float* out) { *reinterpret_cast<float2*>(out) = make_float2(1.f, 2.f); }

#if SM80
// Two tiles of 64 x 16 bytes; tile 1 is still under way when tile 0 is read.
template <int PENDING> __global__ void copies(const float4* x, float4* out) {
    extern __shared__ __align__(1024) unsigned char shared[];
    for (int tile = 0; tile < 2; ++tile) {
        cp_async_16(shared_address(shared) + 16 * (64 * tile + threadIdx.x), x + 64 * tile + threadIdx.x, true);
        cp_async_commit();
    }
    cp_async_wait<PENDING>();
    __syncthreads();
    out[threadIdx.x] = reinterpret_cast<float4*>(shared)[63 - threadIdx.x];
}

// The second copy overwrites what other threads still read.
__global__ void early_copy(const float4* x, float4* out) {
    extern __shared__ __align__(1024) unsigned char shared[];
    for (int tile = 0; tile < 2; ++tile) {
        cp_async_16(shared_address(shared) + 16 * threadIdx.x, x + 64 * tile + threadIdx.x, true);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        out[64 * tile + threadIdx.x] = reinterpret_cast<float4*>(shared)[63 - threadIdx.x];
    }
}
#endif

// c [16, 8] = a [16, 16] b [16, 8]: a and b come through shared memory and ldmatrix.
template <typename T> __global__ void product(const T* a, const T* b, float* c) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int lane = threadIdx.x;
    T* left = reinterpret_cast<T*>(shared);
    T* right = left + 256;
    for (int i = lane; i < 256; i += 32) left[i] = a[i];
    for (int i = lane; i < 256; i += 32) right[i] = b[i % 128];
    __syncthreads();
    unsigned ra[4], rb[4];
    ldmatrix(ra, shared_address(left) + (lane % 16) * 32 + lane / 16 * 16);
    ldmatrix_transposed(rb, shared_address(right) + (lane % 16) * 16);
    float rc[4] = {};
    mma_m16n8k16(rc, ra, rb[0], rb[1], T());
    for (int i = 0; i < 4; ++i) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = rc[i];
}

__global__ void votes(int* out) {
    const int lane = threadIdx.x % 32, odd = threadIdx.x % 2;
    int* mine = out + 8 * threadIdx.x;
    mine[0] = __shfl_sync(0xffffffffu, lane, 3);
    mine[1] = __shfl_down_sync(0xffffffffu, lane, 8);
    mine[2] = __shfl_up_sync(0xffffffffu, lane, 4, 8);
    mine[3] = __ballot_sync(0xffffffffu, odd);
    mine[4] = __any_sync(0xffffffffu, lane == 5) + 2 * __all_sync(0xffffffffu, odd);
    mine[5] = __reduce_max_sync(0xffffffffu, lane);
    mine[6] = __syncthreads_count(threadIdx.x < 40) + 100 * __syncthreads_or(threadIdx.x == 63) +
              1000 * __syncthreads_and(threadIdx.x != 7);
    mine[7] = SM80 + __CUDA_ARCH__;
    atomicAdd(out + 8 * 64, 1);
}
"""


@pytest.fixture(name="module")
def _module(tmp_path: Path) -> Module:
    path = tmp_path / "kernels.cu"
    path.write_text(SOURCE)
    return Module(path, include=[BLOCKS])


def _floats(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32)


def test_barriers_order_what_warps_write_and_read(module: Module) -> None:
    x, out = _floats(64), torch.zeros(128)
    with emulated():
        module.kernel("reverse<true>", "pointer, pointer").launch(1, 64, (x, out))
        assert out.tolist() == [*x.flip(0).tolist(), *(x.flip(0) + 1).tolist()]
        module.kernel("reverse<false>", "pointer, pointer").launch(1, 64, (x, out))
        assert out.tolist() != [*x.flip(0).tolist(), *(x.flip(0) + 1).tolist()]


@pytest.mark.parametrize(
    "name, message",
    [
        ("some_return", r"threads 0 to 39: at barrier 0 \(.*:\d+\)\n  threads 40 to 63: returned"),
        ("two_barriers", r"at the barrier of .*kernels.cu:\d+ and thread \(32, 0, 0\) at that of .*kernels.cu:\d+"),
        ("half_a_warp_shuffles", r"threads 0 to 15: in __shfl_xor_sync with mask 0xffffffff\n  threads 16 to 31: ret"),
    ],
)
def test_threads_that_wait_for_ever_are_named(module: Module, name: str, message: str) -> None:
    with emulated(), pytest.raises(EmulationError, match=message):
        module.kernel(name, "pointer").launch(1, 64, (torch.zeros(64),))


def test_memory_out_of_bounds_is_an_error(module: Module) -> None:
    out = torch.zeros(64)
    shared = module.kernel("shared_bytes", "pointer, int32, int32")
    inside = module.kernel("global_bytes", "pointer, int32")
    with emulated():
        shared.launch(1, 64, (out, 63, 0), shared=256)
        assert out[:63].isnan().all()  # read before anybody wrote
        assert out[63] == 0
        with pytest.raises(EmulationError, match="byte 256 of shared memory, of which the block has 256"):
            shared.launch(1, 64, (out, 64, 1), shared=256)
        with pytest.raises(EmulationError, match="wrote byte 256 of shared memory, of which it has 256"):
            shared.launch(1, 64, (out, 64, 0), shared=256)
        with pytest.raises(EmulationError, match="accesses byte 2048 of shared memory"):
            shared.launch(1, 64, (out, 512, 0), shared=256)
        with (
            emulated(75),
            pytest.raises(EmulationError, match="65537 bytes of shared memory; a block has at most 65536"),
        ):
            shared.launch(1, 64, (out, 0, 0), shared=65537)
        inside.launch(1, 1, (out, 63))
        assert out[63] == 1
        with pytest.raises(EmulationError, match="accesses byte 256 of a tensor's storage of 256 bytes"):
            inside.launch(1, 1, (out, 64))
        with pytest.raises(EmulationError, match="wrote byte -4 of a tensor's storage of 256 bytes"):
            inside.launch(1, 1, (out, -1))
        with pytest.raises(EmulationError, match="which is no tensor's"):
            inside.launch(1, 1, (None, 1), device=out.device)
        inside.launch(1, 1, (out[32:], 1))  # the machine works on
        assert out[33] == 1


def test_an_address_must_be_a_multiple_of_what_is_loaded(module: Module) -> None:
    out = torch.zeros(8)
    kernel = module.kernel("two_at_once", "pointer")
    with emulated():
        kernel.launch(1, 1, (out[2:],))
        assert out[2:4].tolist() == [1, 2]
        with pytest.raises(EmulationError, match=r"kernels.cu:\d+: address 0x\w+ is not a multiple of 8 bytes"):
            kernel.launch(1, 1, (out[3:],))


def test_asynchronous_copies_need_their_waits(module: Module) -> None:
    x, out = torch.randn(128, 4), torch.zeros(128, 4)
    with emulated():
        module.kernel("copies<1>", "pointer, pointer").launch(1, 64, (x, out), shared=2048)
        assert torch.equal(out[:64], x[:64].flip(0))
        module.kernel("copies<2>", "pointer, pointer").launch(1, 64, (x, out), shared=2048)
        assert out[:64].isnan().any()
        module.kernel("early_copy", "pointer, pointer").launch(1, 64, (x, out), shared=1024)
        assert not torch.equal(out, torch.cat([x[:64].flip(0), x[64:].flip(0)]))


@pytest.mark.parametrize("dtype, name", [(torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16")])
def test_matrix_products(module: Module, dtype: torch.dtype, name: str) -> None:
    a, b, c = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype), torch.zeros(16, 8)
    with emulated():
        module.kernel(f"product<{name}>", "pointer, pointer, pointer").launch(1, 32, (a, b, c), shared=1024)
    torch.testing.assert_close(c, a.float() @ b.float())


@pytest.mark.parametrize("arch, macro", [(None, 801), (75, 750)])
def test_shuffles_votes_and_the_architecture(module: Module, arch: int | None, macro: int) -> None:
    out = torch.zeros(8 * 64 + 1, dtype=torch.int32)
    with emulated(arch):
        module.kernel("votes", "pointer").launch(1, 64, (out,))
    lane = torch.arange(64) % 32
    rows = out[:-1].view(64, 8).T
    assert (rows[0] == 3).all()
    assert torch.equal(rows[1].long(), torch.where(lane < 24, lane + 8, lane))
    assert torch.equal(rows[2].long(), torch.where(lane % 8 >= 4, lane - 4, lane))
    assert (rows[3] == 0xAAAAAAAA - 2**32).all()
    assert (rows[4] == 1).all()
    assert (rows[5] == 31).all()
    assert (rows[6] == 140).all()
    assert (rows[7] == macro).all()
    assert out[-1] == 64


def test_arguments_must_fit_the_kernel(module: Module) -> None:
    with emulated(), pytest.raises(EmulationError, match=r"parameters of \[8, 4\] bytes; \[8, 8\] bytes are passed"):
        module.kernel("global_bytes", "pointer, int64").launch(1, 1, (torch.zeros(1), 0))


def test_cpu_tensors_need_the_emulator() -> None:
    with emulated():
        assert flashkernel.softmax(torch.zeros(1, 4), backend="cuda").tolist() == [[0.25] * 4]
    assert cuda.emulator is None
    with pytest.raises(flashkernel.BackendError, match="needs a CUDA GPU"):
        flashkernel.softmax(torch.zeros(1, 4), backend="cuda")


def test_every_ptx_function_is_emulated() -> None:
    def functions(path: Path) -> set[str]:
        text = re.sub(r"namespace cuda_emulator \{.*?\n\}  // namespace", "", path.read_text(), flags=re.DOTALL)
        return set(re.findall(r"^(?:__device__ )?inline [\w ]+?[ *&](\w+)\(", text, re.MULTILINE))

    assert functions(FOLDER / "ptx.cuh") == functions(BLOCKS / "ptx.cuh")


def test_ptx_is_in_its_own_files() -> None:
    package = BLOCKS.parents[1]
    allowed = ("ptx.cuh", "hopper_ptx.cuh", "wgmma_registers.cuh", "wgmma_shared.cuh")  # each has a model on the CPU
    sources = [path for path in package.rglob("*.cu*") if path.suffix in (".cu", ".cuh") and path.name not in allowed]
    assert sources
    assert not [path.name for path in sources if re.search(r"\basm\b", path.read_text())]
