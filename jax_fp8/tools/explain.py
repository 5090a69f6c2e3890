"""What a function multiplies in FP8, what not, and why: read off its jaxpr as it would run on CUDA;
nothing is run or compiled.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jax_fp8.kernels import extension, weight_gradient
from jax_fp8.kernels.gemm import REFERENCE_SCOPE, TARGET
from jax_fp8.ops.head import PLAIN_HEAD_SCOPE
from jax_fp8.ops.passes import PLAIN_SCOPE


@dataclass(frozen=True)
class MatrixProduct:
    """One matrix product (m, k) · (k, n), executed `count` times per call.

    `target` is the custom call, "reference" where kernels are not built, or "xla". `by_design` marks a product that FP8
    is not meant for.
    """

    layer: str
    m: int
    n: int
    k: int
    dtype: str
    target: str
    count: int
    is_fp8: bool
    by_design: bool
    reason: str

    def __str__(self):
        shape = f"{self.count} x ({self.m}, {self.k}) · ({self.k}, {self.n})"
        return (
            f"{'FP8 ' if self.is_fp8 else '    '} {self.target:<14} {self.dtype:<28} {shape:<40} "
            f"{self.layer}: {self.reason}"
        )


IN_THE_HEAD = "the head is kept in bfloat16"
BY_REFERENCE = "FP8 values multiplied by the reference"

# Multiplications of the largest product of layers 1,024 wide with 2,048 tokens, whose step took 2.38 ms in FP8 and 2.26
# in bfloat16 on an H200, and 2.12 and 2.37 on another. With four times the tokens it was 1.08 and 0.96 times as fast;
# the same product twice as wide gained 16 and 20 %. benchmarks/README.md has the table.
TOO_SMALL = 2048 * 1024 * 4096
MAY_NOT_PAY = (
    "FP8 may not pay here: the layers' largest product in FP8 is no larger than those of layers 1,024 wide with "
    "2,048 tokens, whose step ran at 0.95 and 1.12 times the speed of bfloat16 on two H200s; "
    "time recipe=None too, or give a step more tokens"
)


class Explanation(tuple):
    """A tuple of `MatrixProduct`, in program order; printing it gives a table, and says where FP8 may not pay."""

    @property
    def is_small(self) -> bool:
        """Whether the layers' FP8 products are all as small as those that FP8 made no faster on an H200."""
        sizes = [gemm.m * gemm.n * gemm.k for gemm in self if gemm.is_fp8 and "/fprop" in gemm.layer]
        return bool(sizes) and max(sizes) <= TOO_SMALL

    def __str__(self):
        return "\n".join([*map(str, self), *([MAY_NOT_PAY] if self.is_small else [])])


def explain(fn: Callable, *args: Any, strict: bool = False) -> Explanation:
    """List every matrix product of `fn(*args)` as written; the compiler drops those whose result nothing uses.

    Args:
      fn: a function, such as `model.apply`, a gradient or a training step.
      *args: arrays or `jax.ShapeDtypeStruct`s.
      strict: raise a ValueError that names the products that are not in FP8 though FP8 is meant for them: those of
        layers with recipe=None and those made outside jax_fp8.
        Attention scores and a head in bfloat16 are as they should be.
    """
    gemms = Explanation(_matrix_product(*product) for product in products(traced(fn, *args)))
    unquantized = [gemm for gemm in gemms if not gemm.is_fp8 and not gemm.by_design]
    if strict and unquantized:
        raise ValueError(
            f"strict: {len(unquantized)} of {len(gemms)} matrix products are not in FP8:\n"
            + "\n".join(map(str, unquantized))
        )
    return gemms


def traced(fn: Callable, *args: Any) -> Any:
    """The jaxpr of `fn(*args)`.

    What is jitted, such as a training step, is traced as it is:
    with compiler options it cannot be part of another program.
    """
    if not callable(fn) or (hasattr(fn, "init") and hasattr(fn, "apply")):
        raise ValueError(
            f"a function is traced with its arguments, got a {type(fn).__name__}; of a model pass model.apply"
        )
    trace = getattr(fn, "trace", None)
    return (trace(*args).jaxpr if trace else jax.make_jaxpr(fn)(*args)).jaxpr


def products(jaxpr: Any, scope: str = "", count: int = 1) -> Iterator[tuple[Any, str, int]]:
    """The equations of a jaxpr that multiply matrices as it would run on CUDA,
    with their scope and how often a call executes them.
    """
    for equation in jaxpr.eqns:
        path = _path(scope, str(equation.source_info.name_stack))
        if (
            is_fp8_gemm(equation)
            or _is_call(equation, weight_gradient.TARGET)
            or equation.primitive.name == "dot_general"
        ):
            yield equation, path, count
        else:
            times = equation.params["length"] if equation.primitive.name == "scan" else 1
            for inner in _inner_jaxprs(equation):
                yield from products(inner, path, count * times)


def is_fp8_gemm(equation: Any) -> bool:
    """Whether an equation of a jaxpr is the library's custom call."""
    return _is_call(equation, TARGET)


def _is_call(equation, target):
    return equation.primitive.name == "ffi_call" and equation.params["target_name"] == target


def _path(scope, name_stack):
    """Scope names joined by "/", each once where a layer and its op repeat one."""
    names = f"{scope}/{name_stack}".strip("/").split("/")
    return "/".join(name for i, name in enumerate(names) if i == 0 or name != names[i - 1])


def _inner_jaxprs(equation):
    params = equation.params
    if params.get("branches_platforms") is not None:  # made by lax.platform_dependent
        platforms = params["branches_platforms"]
        cuda = next((i for i, names in enumerate(platforms) if names and "cuda" in names), len(platforms) - 1)
        return [_open(params["branches"][cuda])]
    values = [v for value in params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    return [_open(value) for value in values if hasattr(_open(value), "eqns")]


def _open(jaxpr):
    return getattr(jaxpr, "jaxpr", jaxpr)


def _matrix_product(equation, path, count) -> MatrixProduct:
    if is_fp8_gemm(equation):
        return _fp8_gemm(equation, path, count)
    return (_dot if equation.primitive.name == "dot_general" else _weight_gradient)(equation, path, count)


def _fp8_gemm(equation, path, count):
    a, b = (var.aval for var in equation.invars[:2])
    (m, k), n = a.shape, equation.outvars[0].aval.shape[1]  # b may have rows for more columns
    reason = "by the layer's recipe"
    return MatrixProduct(path, m, n, k, _names(a, b), TARGET, count, is_fp8=True, by_design=True, reason=reason)


def _weight_gradient(equation, path, count):
    dy, x = (var.aval for var in equation.invars[:2])
    (k, m), n = dy.shape, x.shape[1]
    target, reason = weight_gradient.TARGET, IN_THE_HEAD
    return MatrixProduct(path, m, n, k, _names(dy, x), target, count, is_fp8=False, by_design=True, reason=reason)


def _dot(equation, path, count):
    (contract_a, contract_b), (batch_a, batch_b) = equation.params["dimension_numbers"]
    a, b = (var.aval for var in equation.invars)
    k = math.prod(a.shape[i] for i in contract_a)
    m = math.prod(size for i, size in enumerate(a.shape) if i not in (*contract_a, *batch_a))
    n = math.prod(size for i, size in enumerate(b.shape) if i not in (*contract_b, *batch_b))
    times = count * math.prod(a.shape[i] for i in batch_a)
    if REFERENCE_SCOPE in path:
        dtypes, reason = "float8 values in bfloat16", f"{BY_REFERENCE}: {extension.missing_reason()}"
        return MatrixProduct(path, m, n, k, dtypes, "reference", times, is_fp8=True, by_design=True, reason=reason)
    by_design, reason = _why_not_fp8(path, batched=bool(batch_a))
    return MatrixProduct(path, m, n, k, _names(a, b), "xla", times, is_fp8=False, by_design=by_design, reason=reason)


def _why_not_fp8(path, batched) -> tuple[bool, str]:
    """Whether a product of XLA's own is as it should be, and the reason."""
    if batched:
        return True, "a batched product of activations, such as attention"
    if PLAIN_HEAD_SCOPE in path:
        return True, IN_THE_HEAD
    return (
        False,
        "the layer has recipe=None" if PLAIN_SCOPE in path else "not made by a jax_fp8 layer; use jax_fp8.Dense",
    )


def _names(a, b) -> str:
    return f"{a.dtype.name} {b.dtype.name}"
