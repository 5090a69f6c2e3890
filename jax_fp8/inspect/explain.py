"""The matrix products of a function: which of them are in FP8, and why others are not. Also what its shards send to
each other. Both are read from its jaxpr as it would run on CUDA; nothing runs or compiles.

    function ─traced→ jaxpr ─products→ MatrixProduct, one for each place ─kinds→ equal ones as one ─str→ table
"""

import math
from collections.abc import Callable, Iterable, Iterator

import jax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn

from jax_fp8.core.types import PyTree
from jax_fp8.inspect.matrix_product import MatrixProduct, kinds
from jax_fp8.inspect.written_collectives import WrittenCollective, shaped, table, written
from jax_fp8.jaxprs.equations import inner_jaxprs, turns
from jax_fp8.kernels import dispatch, extension, few_rows_gemm, grouped_gemm, weight_gradient
from jax_fp8.kernels.chain import in_calls_of_their_own
from jax_fp8.kernels.gemm import REFERENCE_SCOPE, TARGET
from jax_fp8.ops.head import PLAIN_HEAD_SCOPE
from jax_fp8.ops.passes import PLAIN_SCOPE
from jax_fp8.ops.router import ROUTER_SCOPE

IN_THE_HEAD = "the head is kept in bfloat16"
BY_RECIPE = "in FP8 by the layer's recipe"
BY_EXPERTS = f"{BY_RECIPE}, each group of rows with the kernel of its expert"
BY_RAGGED_DOT = "on an H200 XLA multiplies all rows by every expert, as many times the work"
BY_REFERENCE = "FP8 values multiplied by the reference"

BY_FEW_ROWS = "FP8 weights by the kernel for few rows"

FP8_TARGETS = (TARGET, *grouped_gemm.TARGETS, few_rows_gemm.TARGET)
PLAIN_PRODUCTS = ("dot_general", "ragged_dot_general")

# Multiplications of the largest product of layers 1,024 wide with 2,048 tokens, whose step took 2.38 ms in FP8 and 2.26
# in bfloat16 on an H200, and 2.12 and 2.37 on another. With four times the tokens it was 1.08 and 0.96 times as fast;
# the same product twice as wide gained 16 and 20 %. docs/performance.md has the table.
TOO_SMALL = 2048 * 1024 * 4096
MAY_NOT_PAY = (
    "FP8 may not pay here: the layers' largest product in FP8 is no larger than those of layers 1,024 wide with "
    "2,048 tokens, whose step ran at 0.95 and 1.12 times the speed of bfloat16 on two H200s; "
    "time recipe=None too, or give a step more tokens"
)


class Explanation(tuple):
    """A tuple of `MatrixProduct`, in program order. It prints as a table, with a note where FP8 may not pay.

    `collectives` are those written inside a `jax.shard_map`, in program order.
    """

    collectives: tuple[WrittenCollective, ...]

    def __new__(cls, gemms: Iterable[MatrixProduct], collectives: Iterable[WrittenCollective] = ()):
        explanation = super().__new__(cls, gemms)
        explanation.collectives = tuple(collectives)
        return explanation

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in one call, on a ring."""
        return sum(collective.wire_bytes for collective in self.collectives)

    @property
    def is_small(self) -> bool:
        """Whether the layers' FP8 products are all so small that FP8 made such a step hardly faster on an H200."""
        sizes = [gemm.m * gemm.n * gemm.k for gemm in self if gemm.is_fp8 and "/fprop" in gemm.layer]
        return bool(sizes) and max(sizes) <= TOO_SMALL

    def __str__(self):
        notes: dict[str, str] = {}
        rows = [("", "count", "(m, k) · (k, n)", "dtypes", "layer"), *(_row(kind, notes) for kind in kinds(self))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        closing = [f"{mark} {reason}" for reason, mark in notes.items()]
        closing += [MAY_NOT_PAY] if self.is_small else []
        return "\n".join([*lines, *closing, *table(self.collectives)])


def _row(kind: MatrixProduct, notes: dict[str, str]) -> tuple[str, ...]:
    """The columns of a row. A reason other than the recipe becomes a note below the table."""
    mark = "" if kind.reason == BY_RECIPE else " " + notes.setdefault(kind.reason, f"({len(notes) + 1})")
    dtypes = kind.dtype.replace("float8_", "").replace("bfloat16", "bf16").replace("float32", "f32")
    return "FP8" if kind.is_fp8 else "", f"x{kind.count}", kind.shape, dtypes, f"{kind.layer}{mark}"


def explain(fn: Callable, *args: PyTree, strict: bool = False) -> Explanation:
    """List every matrix product of `fn(*args)` as written; the compiler drops those whose result nothing uses.

    The function is traced as it would run on CUDA; nothing runs. The compiler inserts other collectives for arrays that
    it splits itself, on Auto and Explicit axes: `capture_report` lists these, too.

    Args:
      fn: a function, such as `model.apply`, a gradient or a training step.
      *args: arrays, or a `jax.ShapeDtypeStruct` in place of any.
      strict: raise unless every product that is meant for FP8 will run in the FP8 kernels of this machine. The error
        names those that will not: outside of jax_fp8's layers, or by the reference because there are no kernels or no
        GPU with FP8. Without a GPU everything runs by the reference, so strict raises and names the platform.
        Products in a higher precision by choice are allowed: layers with recipe=None, a head without head_recipe,
        attention scores.

    Returns:
      An `Explanation`, which is a tuple of `MatrixProduct` in program order, and prints as a table. Its `collectives`
      are those that the function writes inside a `jax.shard_map`. Products that were left out of FP8 have neither
      `is_fp8` nor `by_design`.

    Raises:
      ValueError: if `fn` is not a function, or if `strict` finds products that will not run in FP8 kernels.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = fp8.Dense(32), jnp.ones((2, 16))
      >>> products = fp8.explain(layer.apply, layer.init(jax.random.key(0), x), x)
      >>> [(product.layer, product.shape, product.is_fp8) for product in products]
      [('Dense/fprop', '(2, 16) · (16, 32)', True)]
    """
    with in_calls_of_their_own(True):
        jaxpr = traced(fn, *args)
    gemms = Explanation((_matrix_product(*product) for product in products(jaxpr)), written(jaxpr))
    if strict:
        _check_kernels_run(gemms)
    return gemms


NAMED = 6  # kinds of products in an error


def _check_kernels_run(gemms: Explanation) -> None:
    outside = [gemm for gemm in gemms if not gemm.is_fp8 and not gemm.by_design]
    platform = jax.default_backend()
    if any(gemm.is_fp8 for gemm in gemms) and platform != "gpu" and not outside:
        raise ValueError(
            f"strict needs an NVIDIA GPU, for FP8 kernels run on nothing else, got the platform {platform!r}, where "
            "the reference multiplies; call it on the machine that trains, or without strict"
        )
    left_out = outside or [gemm for gemm in gemms if gemm.is_fp8 and gemm.target not in FP8_TARGETS]
    if left_out:
        different = kinds(left_out)
        named = [f"{kind.layer} {kind.shape}" for kind in different[:NAMED]]
        named += [f"{len(different) - NAMED} more kinds"] if len(different) > NAMED else []
        reasons = "; ".join(dict.fromkeys(kind.reason for kind in different))
        raise ValueError(
            "strict needs every matrix product that is meant for FP8 in FP8 kernels, "
            f"got {len(left_out)} of {len(gemms)} that are not ({reasons}): {', '.join(named)}"
        )


def traced(fn: Callable, *args: PyTree) -> Jaxpr:
    """The jaxpr of `fn(*args)`. A jitted function, such as a training step, is traced by its own method: with compiler
    options it cannot be part of another program.
    """
    trace = getattr(fn, "trace", None)
    if trace is None and (not callable(fn) or hasattr(fn, "apply")):
        raise ValueError(
            f"a function is traced with its arguments, got a {type(fn).__name__}; of a model pass model.apply"
        )
    return (trace(*args).jaxpr if trace else jax.make_jaxpr(fn)(*args)).jaxpr


def products(jaxpr: Jaxpr, scope: str = "", count: int = 1) -> Iterator[tuple[JaxprEqn, str, int]]:
    """The equations of a jaxpr that multiply matrices, as it would run on CUDA, with their scope and how often a call
    executes them.
    """
    for equation in jaxpr.eqns:
        path = _path(scope, str(equation.source_info.name_stack))
        if _is_call(equation, *FP8_TARGETS, weight_gradient.TARGET) or equation.primitive.name in PLAIN_PRODUCTS:
            yield equation, path, count
        else:
            for inner in inner_jaxprs(equation, "cuda"):
                yield from products(inner, path, count * turns(equation, unknown=1))


def is_fp8_gemm(equation: JaxprEqn) -> bool:
    """Whether an equation of a jaxpr is the library's custom call of one product."""
    return _is_call(equation, TARGET)


def _is_call(equation: JaxprEqn, *targets: str) -> bool:
    return equation.primitive.name == "ffi_call" and equation.params["target_name"] in targets


def _path(scope: str, name_stack: str) -> str:
    """Scope names joined by "/". A name that a layer and its op both have stands there once."""
    names = f"{scope}/{name_stack}".strip("/").split("/")
    return "/".join(name for i, name in enumerate(names) if i == 0 or name != names[i - 1])


def _matrix_product(equation: JaxprEqn, path: str, count: int) -> MatrixProduct:
    if _is_call(equation, *FP8_TARGETS):
        return _fp8_gemm(equation, path, count)
    if equation.primitive.name == "ragged_dot_general":
        return _ragged_dot(equation, path, count)
    return (_dot if equation.primitive.name == "dot_general" else _weight_gradient)(equation, path, count)


def _fp8_gemm(equation: JaxprEqn, path: str, count: int) -> MatrixProduct:
    """A grouped GEMM counts as one product of all rows: it has as many multiplications."""
    a, b = map(shaped, equation.invars[:2])
    (m, k), n = a.shape, shaped(equation.outvars[0]).shape[-1]  # b may have rows for more columns
    target = equation.params["target_name"]
    reason = {TARGET: BY_RECIPE, few_rows_gemm.TARGET: BY_FEW_ROWS}.get(target, BY_EXPERTS)
    return MatrixProduct(path, m, n, k, _names(a, b), target, count, is_fp8=True, by_design=True, reason=reason)


def _ragged_dot(equation: JaxprEqn, path: str, count: int) -> MatrixProduct:
    """Rows by experts, or their gradient, as one product of all rows."""
    a, b = map(shaped, equation.invars[:2])
    (contracted, _), _ = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    k = math.prod(a.shape[i] for i in contracted)
    by_design, reason = _why_not_fp8(path, batched=False)
    reason = f"{reason}; {BY_RAGGED_DOT}"
    m, n = a.size // k, shaped(equation.outvars[0]).shape[-1]
    return MatrixProduct(path, m, n, k, _names(a, b), "xla", count, is_fp8=False, by_design=by_design, reason=reason)


def _weight_gradient(equation: JaxprEqn, path: str, count: int) -> MatrixProduct:
    dy, x = map(shaped, equation.invars[:2])
    (k, m), n = dy.shape, x.shape[1]
    target, reason = weight_gradient.TARGET, IN_THE_HEAD
    return MatrixProduct(path, m, n, k, _names(dy, x), target, count, is_fp8=False, by_design=True, reason=reason)


def _dot(equation: JaxprEqn, path: str, count: int) -> MatrixProduct:
    (contract_a, contract_b), (batch_a, batch_b) = equation.params["dimension_numbers"]
    a, b = map(shaped, equation.invars)
    k = math.prod(a.shape[i] for i in contract_a)
    m = math.prod(size for i, size in enumerate(a.shape) if i not in (*contract_a, *batch_a))
    n = math.prod(size for i, size in enumerate(b.shape) if i not in (*contract_b, *batch_b))
    count *= math.prod(a.shape[i] for i in batch_a)
    if REFERENCE_SCOPE in path:
        path = path.replace(f"/{REFERENCE_SCOPE}", "")
        dtypes, reason = "float8 values in bfloat16", f"{BY_REFERENCE}: {_why_no_kernel()}"
        return MatrixProduct(path, m, n, k, dtypes, "reference", count, is_fp8=True, by_design=True, reason=reason)
    by_design, reason = _why_not_fp8(path, batched=bool(batch_a))
    return MatrixProduct(path, m, n, k, _names(a, b), "xla", count, is_fp8=False, by_design=by_design, reason=reason)


_OTHER_TILES = "kernels know the tiles of BlockScaling, 1 x 128 and 128 x 128, and no others"


def _why_no_kernel() -> str:
    return extension.missing_reason() or dispatch.too_old_gpu() or _OTHER_TILES


def _why_not_fp8(path: str, batched: bool) -> tuple[bool, str]:
    """Whether a product of XLA's own is by design, and the reason."""
    if batched:
        return True, "a batched product of activations, such as attention"
    if PLAIN_HEAD_SCOPE in path:
        return True, IN_THE_HEAD
    if ROUTER_SCOPE in path:
        return True, "a router is kept in float32"
    if PLAIN_SCOPE in path:
        return True, "in bfloat16 by choice: the layer has recipe=None"
    return False, "not made by a jax_fp8 layer; use jax_fp8.Dense, with recipe=None if it is to stay as it is"


def _names(a: ShapedArray, b: ShapedArray) -> str:
    return f"{a.dtype.name} {b.dtype.name}"
