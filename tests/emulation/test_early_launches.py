"""Arrays of a kernel before (`Late`): no thread may touch one before it has waited, and every thread must wait."""

import numpy as np
import pytest

from emulation import EmulationError, InPlace, Late, Result, compile_for_cpu

WAIT = 'const auto wait = [] { asm volatile("griddepcontrol.wait;" ::: "memory"); }; '
SOURCE = """
__global__ void kernel(const float* early, const float* x, float* y) {{ const int t = threadIdx.x; {body} }}
extern "C" int run(const float* early, const float* x, float* y) {{
  kernel<<<2, 64>>>(early, x, y);
  return cudaGetLastError();
}}
"""
X = np.arange(64, dtype=np.float32)


def run(body, x=X, y=None):
    kernels = compile_for_cpu(SOURCE.format(body=WAIT + body), "")
    return kernels.call("run", X, Late(x), Late(Result((64,), np.float32) if y is None else y))[0]


def test_after_a_wait_everything_is_there():
    assert np.array_equal(run("const float own = early[t]; wait(); y[t] = own + x[63 - t];"), X + X[::-1])
    in_place = run("wait(); if (blockIdx.x == 0) y[t] = y[t] + x[t]; __syncthreads();", y=InPlace(X + 1))
    assert np.array_equal(in_place, 2 * X + 1)


MISTAKES = {
    "no wait": ("if (t > 100) y[t] = x[t];", "must wait for the kernels before"),
    "a read before": ("const float own = x[t]; wait(); y[t] = own;", "memory that it must not"),
    "a write before": ("y[t] = early[t]; wait();", "memory that it must not"),
    "a wait of other threads": ("if (t != 5) wait(); __syncthreads(); if (t != 5) y[t] = x[t];", "must wait for"),
    "a read by a thread that has not waited": (
        "if (t < 32) wait(); __syncthreads(); y[t] = x[t]; wait();",
        "memory that it must not",
    ),
    "a read before, in the second block": (
        "float own = 0; if (blockIdx.x == 1) own = x[t]; wait(); y[t] = own;",
        "memory that it must not",
    ),
    "a write to what is only read": ("wait(); const_cast<float*>(x)[t] = 1; y[t] = 1;", "memory that it must not"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    body, sentence = MISTAKES[mistake]
    with pytest.raises(EmulationError, match=sentence):
        run(body)


def test_arrays_that_are_there_need_no_wait():
    kernels = compile_for_cpu(SOURCE.format(body="y[t] = x[t] + early[t];"), "")
    assert np.array_equal(kernels.call("run", X, X, Result((64,), np.float32))[0], 2 * X)
