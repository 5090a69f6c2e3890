"""Products of groups of rows against dense float64 products, one for each group."""

import itertools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close, assert_same_bits

from jax_fp8.core.cast import LINE, SQUARE
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.fp8_array import Fp8Array, tiles_of
from jax_fp8.kernels import dispatch, extension, grouped_gemm
from jax_fp8.kernels.grouped_gemm import (
    GRADIENT_TARGET,
    SQUARE_OF_EACH,
    TARGET,
    grouped_matmul,
    grouped_weight_gradient,
)

OPERANDS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]
# The rows of each group, and behind them: uneven, some without rows, all in one, room for more, no rows at all.
GROUPS = {
    "even": ((128, 128, 128), 0),
    "uneven": ((256, 0, 128), 0),
    "all in one": ((0, 384, 0, 0), 0),
    "room behind": ((128, 128), 256),
    "none": ((0, 0), 128),
}
K, N = 48, 32


def starts_of(name) -> tuple[np.ndarray, int]:
    """The first rows, and how many rows there are."""
    sizes, behind = GROUPS[name]
    starts = np.cumsum([0, *sizes]).astype(np.int32)
    return starts, int(starts[-1]) + behind


def operand(seed, shape, dtype=E4M3, scale=0.3, tile=None) -> Fp8Array:
    rng = np.random.default_rng(seed)
    values = jnp.asarray(rng.normal(size=shape, scale=10).astype(np.dtype(dtype)))
    if tile is None:
        return Fp8Array(values, jnp.float32(scale))
    return Fp8Array(values, jnp.asarray(np.exp2(rng.uniform(-3, 3, tiles_of(shape, tile))), jnp.float32), tile)


def exact(x) -> np.ndarray:
    scale = np.asarray(x.scale, np.float64)
    for dim, length in enumerate(x.tile or ()):
        scale = scale.repeat(length, axis=dim)
    return np.asarray(x.values).astype(np.float64) * scale[tuple(map(slice, x.shape if x.tile else ()))]


MATMUL = jax.jit(grouped_matmul, static_argnames="dtype")
GRADIENT = jax.jit(grouped_weight_gradient, static_argnames="dtype")


def dense_matmul(a, b, starts) -> np.ndarray:
    d = np.zeros((a.shape[0], b.shape[1]))
    for expert, (first, end) in enumerate(itertools.pairwise(starts)):
        d[first:end] = exact(a)[first:end] @ exact(b)[expert].T
    return d


def dense_gradient(a, b, starts) -> np.ndarray:
    pairs = itertools.pairwise(starts)
    return np.stack([exact(a)[:, first:end] @ exact(b)[:, first:end].T for first, end in pairs])


@pytest.mark.parametrize(("a_dtype", "b_dtype"), OPERANDS)
@pytest.mark.parametrize("groups", GROUPS)
def test_against_float64(groups, a_dtype, b_dtype):
    starts, rows = starts_of(groups)
    experts = len(starts) - 1
    a, b = operand(0, (rows, K), a_dtype), operand(1, (experts, N, K), b_dtype, 7.0)
    product = MATMUL(a, b, starts, dtype=jnp.float32)
    wanted = dense_matmul(a, b, starts)
    assert product.shape == (rows, N) and product.dtype == jnp.float32
    assert_close(product, wanted, "gemm_float32") if starts[-1] else assert_same_bits(product, wanted.astype("f4"))
    assert not np.asarray(product)[starts[-1] :].any()

    x, dy = operand(2, (K, rows), a_dtype), operand(3, (N, rows), b_dtype, 7.0)
    gradient = GRADIENT(x, dy, starts)
    wanted = dense_gradient(x, dy, starts)
    assert gradient.shape == (experts, K, N) and gradient.dtype == jnp.float32
    assert_close(gradient, wanted, "gemm_float32") if starts[-1] else assert_same_bits(gradient, wanted.astype("f4"))
    for expert in np.flatnonzero(np.diff(starts) == 0):
        assert not np.asarray(gradient)[expert].any()


@pytest.mark.parametrize(("dtype", "kind"), [(jnp.bfloat16, "gemm_bfloat16"), (jnp.float16, "float16")])
def test_result_dtypes(dtype, kind):
    starts, rows = starts_of("uneven")
    a, b = operand(0, (rows, K), scale=0.1), operand(1, (3, N, K), scale=0.1)
    product = MATMUL(a, b, starts, dtype=dtype)
    assert product.dtype == dtype
    assert_close(product, dense_matmul(a, b, starts), kind)
    x, dy = operand(2, (K, rows), scale=0.1), operand(3, (N, rows), scale=0.1)
    gradient = GRADIENT(x, dy, starts, dtype=dtype)
    assert gradient.dtype == dtype
    assert_close(gradient, dense_gradient(x, dy, starts), kind)


@pytest.mark.parametrize(("k", "n"), [(128, 256), (144, 272), (400, 16)])
def test_by_tile(k, n):
    starts, rows = starts_of("room behind")
    a, b = operand(0, (rows, k), tile=LINE), operand(1, (2, n, k), tile=SQUARE_OF_EACH)
    product = MATMUL(a, b, starts, dtype=jnp.float32)
    assert_close(product, dense_matmul(a, b, starts), "gemm_float32")
    x, dy = operand(2, (k, rows), tile=LINE), operand(3, (n, rows), tile=SQUARE)
    gradient = GRADIENT(x, dy, starts)
    assert_close(gradient, dense_gradient(x, dy, starts), "gemm_float32")
    moved = Fp8Array(b.values, b.scale[::-1], b.tile)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(product, dense_matmul(a, moved, starts), "gemm_float32")


def test_one_group_is_one_product():
    """Bit for bit: small integers, whose sums are exact."""
    values = np.random.default_rng(0).integers(-3, 4, (128, 64)).astype(np.dtype(E4M3))
    matrix = np.random.default_rng(1).integers(-3, 4, (1, 16, 64)).astype(np.dtype(E4M3))
    a, b = Fp8Array(jnp.asarray(values), jnp.float32(0.5)), Fp8Array(jnp.asarray(matrix), jnp.float32(2))
    wanted = reference.matmul(values, matrix[0])
    assert_same_bits(
        MATMUL(a, b, np.int32([0, 128]), dtype=jnp.float32),
        wanted.astype(np.float32),
    )


@pytest.mark.parametrize("wrong", ["starts", "expert", "scale", "zero"])
def test_a_wrong_product_would_be_noticed(wrong):
    starts, rows = starts_of("even")
    a, b = operand(0, (rows, K)), operand(1, (3, N, K), scale=7.0)
    wanted = dense_matmul(a, b, starts)
    found = {
        "starts": lambda: MATMUL(a, b, np.int32([0, 128, 128, 384])),
        "expert": lambda: MATMUL(a, Fp8Array(b.values[::-1], b.scale), starts),
        "scale": lambda: MATMUL(a, Fp8Array(b.values, jnp.float32(1)), starts),
        "zero": lambda: np.zeros((rows, N)),
    }[wrong]()
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(found, wanted, "gemm_bfloat16")


def test_a_nan_stays_in_its_group():
    """One expert's overflow is nobody else's."""
    starts, rows = starts_of("even")
    a, b = operand(0, (rows, K)), operand(1, (3, N, K))
    broken = Fp8Array(b.values.at[1, 3, 5].set(jnp.nan), b.scale)
    is_nan = np.isnan(np.asarray(MATMUL(a, broken, starts, dtype=jnp.float32)))
    assert is_nan[128:256, 3].all() and is_nan.sum() == 128
    x, dy = operand(2, (K, rows)), operand(3, (N, rows))
    broken = Fp8Array(dy.values.at[3, 200].set(jnp.nan), dy.scale)
    is_nan = np.isnan(np.asarray(GRADIENT(x, broken, starts)))
    assert is_nan[1, :, 3].all() and is_nan.sum() == K


@pytest.mark.parametrize("kind", ["groups of its own", "groups of all", "auto", "auto, as on a GPU"])
@pytest.mark.parametrize("by_tile", [False, True])
def test_rows_that_a_mesh_splits(kind, by_tile, monkeypatch, traced_anew):
    """Where starts are split as the rows are, each shard has groups of its own; else the groups are of all rows."""
    is_own, explicit = kind == "groups of its own", not kind.startswith("auto")
    if kind == "auto, as on a GPU":  # partitioned as the custom call is, with the reference in its place
        monkeypatch.setattr(dispatch, "_on_platform", lambda kernel, reference, *args: kernel(*args))
        monkeypatch.setattr(grouped_gemm, "_matmul_kernel", grouped_gemm._matmul_reference)
        monkeypatch.setattr(grouped_gemm, "_gradient_kernel", grouped_gemm._gradient_reference)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit if explicit else AxisType.Auto,))
    k, rows = 128, 512
    line, square, each = (LINE, SQUARE, SQUARE_OF_EACH) if by_tile else (None,) * 3
    a, b = operand(0, (rows, k), tile=line), operand(1, (2, N, k), tile=each)
    x, dy = operand(2, (k, rows), tile=line), operand(3, (N, rows), tile=square)
    starts = np.int32([0, 128, 256, 0, 0, 128]) if is_own else np.int32([0, 128, 384])
    groups = [[(0, 128), (256, 256)], [(128, 256), (256, 384)]] if is_own else [[(0, 128)], [(128, 384)]]
    wanted, wanted_gradient = np.zeros((rows, N)), np.zeros((2, k, N))
    for expert, first, end in ((e, *bounds) for e, of_expert in enumerate(groups) for bounds in of_expert):
        wanted[first:end] = exact(a)[first:end] @ exact(b)[expert].T
        wanted_gradient[expert] += exact(x)[:, first:end] @ exact(dy)[:, first:end].T

    def placed(tree, *spec):
        return jax.tree.map(
            lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P(*spec) if leaf.ndim == len(spec) else P())), tree
        )

    c = np.random.default_rng(5).normal(size=wanted_gradient.shape).astype(np.float32)
    with jax.set_mesh(mesh) if explicit else nullcontext():
        first = placed(jnp.asarray(starts), "data" if is_own else None)
        product = jax.jit(lambda a, b, s: grouped_matmul(a, b, s, dtype=jnp.float32))(placed(a, "data", None), b, first)
        operands = placed(x, None, "data"), placed(dy, None, "data"), first
        gradient = jax.jit(grouped_weight_gradient)(*operands)
        added = jax.jit(lambda *of, c: grouped_weight_gradient(*of, c=c, alpha=0.5))(*operands, c=c)
    assert_close(product, wanted, "gemm_float32")
    assert_close(gradient, wanted_gradient, "gemm_float32")
    assert_close(added, wanted_gradient / 2 + c, "gemm_float32")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gradient_that_is_added_to_a_sum(dtype):
    """Negative control: with another factor."""
    starts, rows = starts_of("uneven")
    x, dy = operand(2, (K, rows)), operand(3, (N, rows), E5M2)
    c = jnp.asarray(np.random.default_rng(4).normal(size=(3, K, N)), dtype)

    @jax.jit
    def added(x, dy, starts, c):
        return grouped_weight_gradient(x, dy, starts, dtype=dtype, c=c, alpha=0.25)

    found = added(x, dy, starts, c)
    plain, products = np.asarray(c, np.float64), dense_gradient(x, dy, starts)
    assert found.dtype == dtype
    assert_close(found, plain + 0.25 * products, f"gemm_{jnp.dtype(dtype).name}")
    with pytest.raises(AssertionError):
        assert_close(found, plain + 0.3 * products, f"gemm_{jnp.dtype(dtype).name}")
    assert_same_bits(found[1], c[1])  # of a group without rows


def test_lowering_for_cuda(with_kernels):
    """The custom calls, with what they are told; and none of them on a CPU."""
    starts, rows = starts_of("even")
    a, b = operand(0, (rows, 128), tile=LINE), operand(1, (3, N, 128), tile=SQUARE_OF_EACH)
    x, dy = operand(2, (128, rows)), operand(3, (N, rows), E5M2)

    def both(a, b, x, dy, starts):
        return grouped_matmul(a, b, starts), grouped_weight_gradient(x, dy, starts)

    traced = jax.jit(both).trace(a, b, x, dy, jnp.asarray(starts))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (product,) = [line for line in text.splitlines() if f"custom_call @{TARGET}(" in line]
    (gradient,) = [line for line in text.splitlines() if f"custom_call @{GRADIENT_TARGET}(" in line]
    assert 'scaling = "1d2d"' in product and 'scaling = ""' in gradient
    # Scales of lines are transposed, those of squares filled up to a multiple of four.
    assert "tensor<1x384xf32>, tensor<3x1x4xf32>, tensor<4xi32>) -> tensor<384x32xbf16>" in product
    assert "tensor<f32>, tensor<f32>, tensor<4xi32>) -> tensor<3x128x32xf32>" in gradient
    on_cpu = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert TARGET not in on_cpu and GRADIENT_TARGET not in on_cpu


def test_an_older_build_without_the_kernel_is_said_on_a_gpu(monkeypatch):
    monkeypatch.setattr(extension, "TARGETS", ("jax_fp8_gemm",))
    extension.check_target(TARGET)  # where there is no GPU, programs for one are traced and not run
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    extension.check_target("jax_fp8_gemm")
    with pytest.raises(ValueError, match=r"the CUDA kernel jax_fp8_grouped_gemm is needed, but .* built before"):
        extension.check_target(TARGET)


def test_refusals():
    starts, rows = starts_of("even")
    a, b, s = operand(0, (rows, K)), operand(1, (3, N, K)), jnp.asarray(starts)
    x, dy = operand(2, (K, rows)), operand(3, (N, rows))
    e5m2 = operand(0, (rows, K), E5M2), operand(1, (3, N, K), E5M2)
    in_16 = jnp.zeros((3, K, N), jnp.bfloat16)
    refused = [
        ("needs Fp8Arrays, got float32", lambda: grouped_matmul(jnp.ones((128, 16)), b, s)),
        (r"needs a \(rows, k\) and b \(experts, n, k\)", lambda: grouped_matmul(a, operand(1, (N, K)), s)),
        ("two E5M2 operands", lambda: grouped_matmul(*e5m2, s)),
        ("writes bfloat16, float16 or float32", lambda: grouped_matmul(a, b, s, dtype=jnp.int32)),
        ("needs k to be a multiple of 16", lambda: grouped_matmul(operand(0, (128, 24)), operand(1, (3, N, 24)), s)),
        ("groups of whole 128 rows, got 64", lambda: grouped_matmul(operand(0, (64, K)), b, s)),
        (r"needs starts i32\[experts \+ 1\].* for 3 experts", lambda: grouped_matmul(a, b, s[:-1])),
        (r"needs starts i32\[experts \+ 1\]", lambda: grouped_matmul(a, b, s.astype(jnp.float32))),
        (r"needs a \(m, rows\) and b \(n, rows\)", lambda: grouped_weight_gradient(x, a, s)),
        ("needs m to be a multiple of 16", lambda: grouped_weight_gradient(operand(0, (8, rows)), dy, s)),
        (r"needs starts i32\[experts \+ 1\]", lambda: grouped_weight_gradient(x, dy, s[:1])),
        (r"needs starts i32\[experts \+ 1\], .*got a list", lambda: grouped_weight_gradient(x, dy, [0, 128])),
        (
            r"needs c float32\(3, 48, 32\), got bfloat16\(3, 48, 32\)",
            lambda: grouped_weight_gradient(x, dy, s, c=in_16),
        ),
    ]
    for sentence, call in refused:
        with pytest.raises(ValueError, match=sentence):
            call()
