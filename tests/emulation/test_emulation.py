"""The stand-in for CUDA, on small kernels: shared memory, launches, and each mistake that it must name."""

import numpy as np
import pytest
from reference import assert_same_bits

from emulation import CompilerError, EmulationError, InPlace, Input, Result, compile_for_cpu
from emulation.rewrite import rewrite

X = np.arange(64, dtype=np.float32)
Y = Result((64,), np.float32)

REVERSE = "s[t] = x[t]; __syncthreads(); y[t] = s[63 - t];"
REVERSING = {
    "static": f"__shared__ float s[64]; {REVERSE}",
    "aligned": f"__shared__ alignas(16) float s[64]; {REVERSE}",
    "dynamic": f"extern __shared__ float s[]; {REVERSE}",
    "two dims": "__shared__ float s[8][8]; s[t / 8][t % 8] = x[t]; __syncthreads(); y[t] = s[7 - t / 8][7 - t % 8];",
    "a scalar": (
        "__shared__ float one; for (int i = 0; i < 64; ++i) { if (t == i) one = x[i]; "
        "__syncthreads(); if (t == 63 - i) y[t] = one; __syncthreads(); }"
    ),
    "those who have ended have arrived": (
        "__shared__ float s[64]; s[t] = x[t]; if (t >= 32) return; __syncthreads(); y[t] = s[63 - t]; y[63 - t] = s[t];"
    ),
    "much": "extern __shared__ float4 much[]; much[t * 100].x = x[t]; __syncthreads(); y[t] = much[(63 - t) * 100].x;",
}

FETCH = (
    "__shared__ alignas(16) float4 s[64]; auto* const from = reinterpret_cast<const float4*>(x) + t / 4; "
    "const auto fetch = [&](const void* target, const void* source) { "
    'asm volatile("cp.async.cg.shared.global [%0], [%1], %2;" '
    ': : "l"(__cvta_generic_to_shared(target)), "l"(source), "n"(16) : "memory"); }; '
    'const auto wait = [] { asm volatile("cp.async.wait_all;" ::: "memory"); }; '
    "const auto own = [&] { return reinterpret_cast<float*>(s + t)[t % 4]; }; "
)
BATCHES = (
    f"{FETCH} __shared__ alignas(16) float4 other[64]; "
    'const auto end = [] { asm volatile("cp.async.commit_group;" ::: "memory"); }; '
    'const auto wait_for_earlier = [] { asm volatile("cp.async.wait_group %0;" : : "n"(1) : "memory"); }; '
)
FETCHING = {
    "a copy": f"{FETCH} fetch(s + t, from); wait(); y[t] = own();",
    "two copies": f"{FETCH} fetch(s + t, x); fetch(s + t, from); wait(); y[t] = own();",
    "a copy after a read": f"{FETCH} fetch(s + t, from); wait(); y[t] = own(); fetch(s + t, x); wait();",
    "a batch": (
        f"{BATCHES} fetch(s + t, from); end(); fetch(other + t, x); end(); wait_for_earlier(); y[t] = own(); wait();"
    ),
    "an empty batch": f"{BATCHES} fetch(s + t, from); end(); end(); wait_for_earlier(); y[t] = own();",
}

MISTAKES = {
    "no wait": (f"{FETCH} fetch(s + t, from); y[t] = own(); wait();", "order of threads"),
    "a copy over what is read": (
        f"{FETCH} fetch(s + t, from); wait(); fetch(s + t, x); y[t] = own(); wait();",
        "order",
    ),
    "a batch that is the last": (
        f"{BATCHES} fetch(s + t, from); end(); wait_for_earlier(); y[t] = own(); wait();",
        "order of threads",
    ),
    "a batch that does not end": (
        f"{BATCHES} fetch(s + t, from); fetch(other + t, x); end(); wait_for_earlier(); y[t] = own(); wait();",
        "order of threads",
    ),
    "no wait for the last batch": (
        f"{BATCHES} fetch(s + t, from); end(); fetch(other + t, x); end(); wait_for_earlier(); y[t] = own();",
        "ends before what it fetches has arrived",
    ),
    "no wait at the end": (f"{FETCH} y[t] = x[t]; fetch(s + t, from);", "ends before what it fetches has arrived"),
    "a copy to memory": (f"{FETCH} y[t] = x[t]; fetch(y, from); wait();", "which is not in shared memory"),
    "a copy to an odd place": (f"{FETCH} y[t] = x[t]; fetch(&s[t].y, from); wait();", "cp.async of 16 bytes"),
    "no barrier": ("__shared__ float s[64]; s[t] = x[t]; y[t] = s[63 - t];", "order of threads"),
    "no second barrier": (
        (
            "__shared__ float s; for (int i = 0; i < 64; ++i) { if (t == i) s = x[i]; "
            "__syncthreads(); if (t == 63 - i) y[t] = s; }"
        ),
        "order of threads",
    ),
    "no barrier of a warp": ("__shared__ float s[64]; s[t] = x[t]; y[t] = s[t ^ 1];", "order of threads"),
    "a byte not written": ("if (t != 5) y[t] = x[t];", "result 0.*4 bytes"),
    "two barriers": (
        "if (t < 32) { __syncthreads(); } else {\n __syncthreads(); }",
        (
            "deadlock.*32 threads, first 0, wait in __syncthreads at two barriers:1.*"
            "32 threads, first 32.*two barriers:2"
        ),
    ),
    "a barrier and a warp": (
        "if (t == 0) __syncthreads(); else __syncwarp();",
        (
            "deadlock.*1 threads, first 0, wait in __syncthreads.*31 threads, first 1, wait in __syncwarp"
            ".* lanes 0xFFFFFFFF"
        ),
    ),
    "an ended lane": ("if (t == 3) return; y[t] = __shfl_sync(0xFFFFFFFFu, x[t], 0);", "deadlock.*have ended"),
    "not in the mask": ("y[t] = __shfl_xor_sync(0xFFFFu, x[t], 1);", "lane 16 is not in its own mask|lane 31 is not"),
    "a lane not in the mask": ("y[t] = t % 2 ? __shfl_sync(0xAAAAAAAAu, x[t], 0) : x[t];", "order of threads"),
    "a read behind the end": ("y[t] = x[t + 1];", "nearest is argument 0: byte 256, and it has 256"),
    "a read before the begin": ("y[t] = x[t - 1];", "nearest is argument 0: byte -4"),
    "a write behind the end": ("y[t] = x[t]; if (t == 63) y[64] = 1;", "argument 1: byte 256"),
    "a write before the begin": ("y[t] = x[t]; if (t == 0) y[-1] = 1;", "argument 1 was written before its begin"),
    "a write far behind the end": ("y[t] = x[t]; if (t == 63) y[100'000] = 1;", "must not.*argument 1: byte 400000"),
    "a write far before the begin": (
        "y[t] = x[t]; if (t == 63) y[-100'000] = 1;",
        "must not.*argument 1: byte -400000",
    ),
    "a write to an input": (
        "y[t] = x[t]; const_cast<float*>(x)[t] = 1;",
        "nearest is argument 0: a write to byte 0, and it is an input",
    ),
    "an index": ("__shared__ float s[64]; s[t + 1] = x[t]; y[t] = x[t];", "an index:1: the index 64 is outside"),
    "shared memory through a pointer": (
        "__shared__ float s[64]; float* p = s; p[t + 1] = x[t]; y[t] = x[t];",
        "writes outside its 256 bytes of shared memory, shared memory through a pointer:1",
    ),
    "a vector": ("y[t] = x[t]; if (t == 0) *reinterpret_cast<float4*>(y + 2) = {};", "not aligned"),
    "a vector that is loaded": (
        (
            "y[t] = __ldg(reinterpret_cast<const float4*>(x) + t / 8).x + "
            "__ldg(reinterpret_cast<const float2*>(x + 1)).y;"
        ),
        "a vector that is loaded:1: the address .* not aligned to 8 bytes, in thread",
    ),
    "a vector of bytes in shared memory": (
        "__shared__ uint8_t s[256]; y[t] = x[t]; reinterpret_cast<uint4*>(s)[t / 4] = {};",
        "not aligned",
    ),
    "a shift": ("y[t] = static_cast<float>(1u << t);", "a shift by 32|a shift by 63"),
    "a sum": ("y[t] = x[t]; volatile int a = 2147483647 - 62; a = a + t;", "a sum:1: a sum overflows, in thread"),
    "a difference": ("y[t] = x[t]; volatile int a = -2147483647 + 61; a = a - t;", "a difference overflows"),
    "a product": ("y[t] = x[t]; volatile int a = t << 26; a = a * 2;", "a product overflows"),
    "a float": (
        "y[t] = x[t]; volatile float a = t < 63 ? 1.0f : 3e9f; volatile int b = static_cast<int>(a);",
        "a float:1: a float that the integer cannot hold",
    ),
    "no address": (
        "y[t] = x[t]; float* volatile p = t < 63 ? y : nullptr; if (t == 63) *p = 1;",
        "no address:1: the address \\(nil\\) is null",
    ),
    "an address past the end of memory": (
        "volatile int64_t far = t < 63 ? 0 : int64_t{1} << 60; y[t] = x[-far];",
        "an address past the end of memory:1: from the address .* which is in no array",
    ),
    "the stack": ("volatile char deep[1 << 20]; deep[t] = 1; y[t] = deep[t];", "touches memory that it must not"),
}


BODIES = (
    {"number of the block": "y[t] = blockIdx.x;"}
    | REVERSING
    | FETCHING
    | {mistake: body for mistake, (body, _) in MISTAKES.items()}
)


def run(name, threads=64, shared=0, blocks=(1, 1), allowed=0):
    """Runs one of BODIES, kernels from X to a Y, of which `t` is the thread; all of them are compiled at once."""
    source, calls = "", ""
    for number, (key, body) in enumerate(BODIES.items()):
        head = f"__global__ void kernel_{number}(const float* x, float* y) {{ const int t = threadIdx.x;"
        source += f'#line 1 "{key}"\n{head} {body} }}\n'
        calls += f"""case {number}: {{
          if (allowed && cudaFuncSetAttribute(kernel_{number}, cudaFuncAttributeMaxDynamicSharedMemorySize, allowed)) \
return 77;
          kernel_{number}<<<dim3(width, height), threads, shared>>>(x, y);
          return cudaGetLastError();
        }}"""
    parameters = "int64_t which, int64_t threads, int64_t shared, int64_t width, int64_t height, int64_t allowed"
    entry = f'extern "C" int run(const float* x, float* y, {parameters}) {{ switch (which) {{ {calls} }} return 78; }}'
    return compile_for_cpu(source, entry).call("run", X, Y, list(BODIES).index(name), threads, shared, *blocks, allowed)


@pytest.mark.parametrize("body", REVERSING)
def test_shared_memory(body):
    (y,) = run(body, **{"dynamic": {"shared": 256}, "much": {"shared": 100816, "allowed": 100816}}.get(body, {}))
    assert_same_bits(y, X[::-1])


@pytest.mark.parametrize("body", FETCHING)
def test_copies_to_shared_memory(body):
    (y,) = run(body)
    assert_same_bits(y, X)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    with pytest.raises(EmulationError, match=MISTAKES[mistake][1]):
        run(mistake)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"threads": 1025}, "got CUDA error 9$"),
        ({"threads": 0}, "got CUDA error 9$"),
        ({"blocks": (0, 1)}, "got CUDA error 9$"),
        ({"blocks": (1, 65536)}, "got CUDA error 9$"),
        ({"shared": 48 * 1024 + 1}, "got CUDA error 1$"),
        ({"allowed": 1 << 20}, "got CUDA error 77$"),
        ({"blocks": (2, 1)}, "order of threads"),
    ],
)
def test_a_launch_beyond_the_limits_is_an_error(how, sentence):
    with pytest.raises(EmulationError, match=sentence):
        run("number of the block", **how)


@pytest.mark.parametrize(("body", "shared"), [("much", 100800), ("dynamic", 252), ("dynamic", 0)])
def test_too_little_shared_memory_is_an_error(body, shared):
    with pytest.raises(EmulationError, match=r"writes outside its \d* bytes of shared memory|must not"):
        run(body, shared=shared, allowed=100800)


def test_a_failed_call_leaves_the_library_usable():
    source = "__global__ void kernel(float* y) { y[threadIdx.x] += 1; }"
    entry = 'extern "C" int run(int64_t threads, float* y) { kernel<<<1, threads>>>(y); return cudaGetLastError(); }'
    kernels = compile_for_cpu(source, entry)
    with pytest.raises(EmulationError, match="argument 1"):
        kernels.call("run", 1024, InPlace(X))
    (y,) = kernels.call("run", 64, InPlace(X))
    assert_same_bits(y, X + 1)


def test_a_kernel_that_ends_its_process_ends_no_other():
    entries = 'extern "C" int end() { abort(); }\nextern "C" int go_on() { return 0; }\n'
    kernels = compile_for_cpu("__global__ void nothing_kernel() {}", entries)
    with pytest.raises(EmulationError, match="end: a kernel ended its process, exit code -6"):
        kernels.call("end")
    kernels.call("go_on")


def test_a_list_is_an_array_of_pointers():
    source = "__global__ void kernel(const float* x, float* y) { y[threadIdx.x] += x[threadIdx.x]; }"
    entry = """extern "C" int run(int64_t count, const float* const* x, float* const* y) {
      for (int64_t i = 0; i < count; ++i) {
        if (x[i] != nullptr) kernel<<<1, 64>>>(x[i], y[i]);
      }
      return cudaGetLastError();
    }"""
    kernels = compile_for_cpu(source, entry)
    y = kernels.call("run", 3, [X, None, 2 * X], [InPlace(X), InPlace(X), InPlace(X)])
    for array, factor in zip(y, (2, 1, 3), strict=True):
        assert_same_bits(array, factor * X)
    with pytest.raises(EmulationError, match=r"argument 1\[1\]: byte 240, and it has 240"):
        kernels.call("run", 2, [X, X[4:]], [InPlace(X), InPlace(X)])


def test_an_array_lies_where_it_is_told_to():
    source = "__global__ void kernel(const uint8_t* x, int64_t* y) { y[0] = reinterpret_cast<int64_t>(x) % 16; }"
    entry = 'extern "C" int run(const uint8_t* x, int64_t* y) { kernel<<<1, 1>>>(x, y); return cudaGetLastError(); }'
    for offset in (0, 1, 8, 15):
        for size in (0, 1, 4096, 4097):
            x = Input(np.zeros(size, np.uint8), offset)
            (y,) = compile_for_cpu(source, entry).call("run", x, Result((1,), np.int64))
            assert y[0] == offset


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("__shared__ float a[2], b[2];", "must declare one array"),
        ("__shared__ float a = 1;", "must declare one array"),
        ('asm("mov.b32 %1, %0;" : "=r"(a) : "r"(b));', "one instruction of all its operands in order"),
        ('asm("add.f32 %0, %1, %2; add.f32 %0, %0, %2;" : "=f"(a) : "f"(b), "f"(c));', "one instruction"),
        ('asm("mov.b32 %0, %1;" : "=r"(a) : "r"(b);', "a bracket must close"),
    ],
)
def test_what_cannot_be_rewritten_is_an_error(source, sentence):
    with pytest.raises(ValueError, match=sentence):
        rewrite(source, "a.cu")


def test_a_mistake_that_is_not_in_the_source_is_an_error():
    with pytest.raises(ValueError, match="must contain what is to be changed"):
        compile_for_cpu("amax.cu", "", (("amax.cu", "no such text", ""),))


def test_an_instruction_that_is_not_known_is_an_error_of_the_compiler():
    with pytest.raises(CompilerError, match=r"csrc/source.cu:1.*cvt_a_b.* is not a member of"):
        compile_for_cpu('void f(float& a) { asm("cvt.a.b %0, %1;" : "=f"(a) : "f"(a)); }', "")
