"""The stand-in for CUDA, on small kernels that clusters of blocks run together."""

import numpy as np
import pytest
from reference import assert_same_bits

from emulation import EmulationError, Result, compile_for_cpu

THREADS = 40  # a warp and a part of one
BARRIER = "arrive_at_cluster(); wait_for_cluster();"
MINE, THEIRS = "s[t] = x[i];", "y[i] = in_block(s, next)[t];"

# Every block gets the elements of the next one in its cluster; `t` is the thread, `i` its element.
GOOD = {
    "read": f"__shared__ float s[40]; {MINE} {BARRIER} {THEIRS} {BARRIER}",
    "dynamic": f"extern __shared__ float s[]; {MINE} {BARRIER} {THEIRS} {BARRIER}",
    "written": f"__shared__ float s[40]; {BARRIER} in_block(s, previous)[t] = x[i]; {BARRIER} y[i] = s[t];",
    "in the middle of an array": (
        f"__shared__ float s[2][40]; s[1][t] = x[i]; {BARRIER} y[i] = *in_block(&s[1][t], next); {BARRIER}"
    ),
    "an early arrival": (
        f"__shared__ float s[40]; {MINE} arrive_at_cluster(); __syncthreads(); wait_for_cluster(); {THEIRS} {BARRIER}"
    ),
    "a barrier of a block in between": (
        f"__shared__ float s[40]; s[39 - t] = x[i]; {BARRIER} const float z = in_block(s, next)[t]; {BARRIER} "
        "s[t] = z; __syncthreads(); y[i] = s[39 - t];"
    ),
    "those who have ended have arrived": (
        f"__shared__ float s[40]; {MINE} {BARRIER} {THEIRS} if (t > 9) return; {BARRIER} {BARRIER}"
    ),
}

MISTAKES = {
    "no barrier": (f"__shared__ float s[40]; {MINE} {THEIRS} {BARRIER}", "has not begun"),
    "a barrier of a block": (f"__shared__ float s[40]; {MINE} __syncthreads(); {THEIRS} {BARRIER}", "has not begun"),
    "no barrier for the second time": (
        f"__shared__ float s[40]; {BARRIER} {MINE} {THEIRS} {BARRIER}",
        "order of threads",
    ),
    "no barrier at the end": (
        f"__shared__ float s[40]; {MINE} {BARRIER} {THEIRS}",
        "block [01] of the cluster has ended",
    ),
    "what is read of a block that has ended": (
        f"__shared__ float s[40]; {MINE} {BARRIER} const float* z = in_block(s, next); {BARRIER} y[i] = z[t];",
        "order of threads",
    ),
    "what is written to a block that has ended": (
        f"__shared__ float s[40]; {BARRIER} float* z = in_block(s, next); y[i] = x[i]; {BARRIER} z[t] = 1;",
        r"block \(\d, 0, 0\) had ended when its shared memory was written",
    ),
    "beside an array of another block": (
        f"__shared__ float s[40]; {BARRIER} in_block(s, next)[t + 1] = x[i]; y[i] = x[i]; {BARRIER}",
        "writes outside its 160 bytes of shared memory",
    ),
    "no such block": (f"__shared__ float s[40]; {BARRIER} y[i] = *in_block(s, 4);", "block 4 of a cluster of 4"),
    "not shared memory": (
        f"{BARRIER} y[i] = *in_block(x + i, next); {BARRIER}",
        "is not in shared memory of this block",
    ),
    "two arrivals": (
        "y[i] = x[i]; arrive_at_cluster(); arrive_at_cluster();",
        "an arrival at the cluster's barrier that follows another",
    ),
    "no arrival": ("y[i] = x[i]; wait_for_cluster();", "a wait for the cluster's barrier without an arrival"),
    "not all arrive": (
        f"if (t == 3 && next == 2) __syncthreads(); else {{ {BARRIER} }}",
        (
            "deadlock.*1 threads, first 3, of block 1 of the cluster, wait in __syncthreads.*"
            "40 threads, first 0, of block 2 of the cluster, wait in barrier.cluster.wait"
        ),
    ),
}

BODIES = GOOD | {mistake: body for mistake, (body, _) in MISTAKES.items()}


def run(name, cluster=4, blocks=8, threads=THREADS, allow_16=False):
    """Runs one of BODIES, kernels from x to a y of as many elements as there are threads; returns both."""
    source, calls = '#include "device/cluster.cuh"\nusing namespace jax_fp8;\n', ""
    for number, (key, body) in enumerate(BODIES.items()):
        source += f"""__global__ void kernel_{number}(const float* x, float* y, int blocks) {{
          const int t = threadIdx.x, i = blockIdx.x * blockDim.x + t, rank = blockIdx.x % blocks;
          const int next = (rank + 1) % blocks, previous = (rank + blocks - 1) % blocks;
#line 1 "{key}"
          {body}
        }}\n"""
        calls += f"case {number}: return launch(kernel_{number}, cluster, blocks, threads, allow, x, y);"
    entry = f"""
    template <typename Kernel>
    int launch(Kernel kernel, int64_t cluster, int64_t blocks, int64_t threads, int64_t allow, \
const float* x, float* y) {{
      cudaLaunchAttribute attribute{{.id = cudaLaunchAttributeClusterDimension}};
      attribute.val.clusterDim = {{static_cast<unsigned>(cluster), 1, 1}};
      cudaLaunchConfig_t config{{.gridDim = dim3(blocks), .blockDim = dim3(threads), .dynamicSmemBytes = 160,
                                .attrs = &attribute, .numAttrs = 1}};
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, allow);
      return cudaLaunchKernelEx(&config, kernel, x, y, static_cast<int>(cluster));
    }}
    extern "C" int run(const float* x, float* y, int64_t which, int64_t cluster, int64_t blocks, int64_t threads, \
int64_t allow) {{
      switch (which) {{ {calls} }}
      return 78;
    }}"""
    x = np.arange(blocks * threads, dtype=np.float32)
    arguments = x, Result(x.shape, np.float32), list(BODIES).index(name), cluster, blocks, threads, allow_16
    return x, *compile_for_cpu(source, entry).call("run", *arguments)


@pytest.mark.parametrize("body", GOOD)
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_blocks_share_their_memory(body, cluster):
    x, y = run(body, cluster)
    assert_same_bits(y, np.roll(x.reshape(-1, cluster, THREADS), -1, axis=1).reshape(-1))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    with pytest.raises(EmulationError, match=MISTAKES[mistake][1]):
        run(mistake)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"cluster": 3}, "got CUDA error 912$"),
        ({"cluster": 0}, "got CUDA error 912$"),
        ({"cluster": 16, "blocks": 16}, "got CUDA error 912$"),
        ({"cluster": 32, "blocks": 32, "allow_16": True}, "got CUDA error 912$"),
        ({"cluster": 16, "blocks": 16, "threads": 544, "allow_16": True}, "a cluster of 8704 threads; here are 8192$"),
    ],
)
def test_a_cluster_beyond_the_limits_is_an_error(how, sentence):
    with pytest.raises(EmulationError, match=sentence):
        run("written", **how)


def test_a_cluster_of_16_must_be_asked_for():
    x, y = run("read", cluster=16, blocks=32, allow_16=True)
    assert_same_bits(y, np.roll(x.reshape(2, 16, THREADS), -1, axis=1).reshape(-1))
