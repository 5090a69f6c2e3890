"""One rule, three kinds of mesh: on eight CPU devices the results are those of one, an amax is that of the whole array.

Sums over a sharded contraction are compared exactly: their terms are small integers.
"""

import contextlib
import functools
import re
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.recipe import CurrentScaling
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.kernels import dispatch, extension
from jax_fp8.kernels.amax import amax
from jax_fp8.kernels.dispatch import pmax, psum, split_axes
from jax_fp8.kernels.gemm import matmul
from jax_fp8.kernels.quantize import quantize_rowwise, quantize_transpose
from jax_fp8.ops.linear import linear
from jax_fp8.ops.parameters import LinearParameters

pytestmark = pytest.mark.versions

SCALE = 0.3
CAST, BY_TILE = Cast.with_scale(E4M3, SCALE), Cast.by_tile(E4M3, (1, 16), ScaleFormula())
SPECS = [P("data", None), P(None, "model"), P("data", "model"), P(("data", "model"), None), P(None, None)]


def make_mesh(axis_type=AxisType.Explicit) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)


def place(mesh, spec, array) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, spec))


def integers(seed, *shape, dtype=jnp.float32) -> np.ndarray:
    """From -3 to 3: exact in every format, and so are their products and sums."""
    return np.asarray(np.random.default_rng(seed).integers(-3, 4, shape), dtype)


def input_with_one_largest() -> np.ndarray:
    """A matrix whose amax only one shard sees."""
    x = np.random.default_rng(0).normal(size=(32, 64)).astype(jnp.bfloat16)
    x[17, 40] = -99
    return x


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    mesh = make_mesh(request.param)
    with jax.set_mesh(mesh):
        yield mesh


def test_split_axes():
    split = {"m": ("data",), "k": ("model", "pipe")}
    assert split_axes(split, "m", "n", "k") == ("data", "model", "pipe")
    assert split_axes(split, "n") == ()
    assert pmax(jnp.float32(3), split, "n") == psum(jnp.float32(3), split, "n") == 3  # no axis, no collective


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_quantize(mesh, spec):
    x = input_with_one_largest()
    values, expected_amax = reference.quantize(x, E4M3, SCALE)
    pair = jax.jit(lambda x: quantize_rowwise(x, CAST))(place(mesh, spec, x))
    assert_same_bits(pair.rowwise.values, values)
    assert_same_bits(pair.amax, expected_amax)
    assert pair.rowwise.values.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)  # nothing was gathered
    assert pair.amax.sharding.is_fully_replicated


def test_quantize_transpose_gathers_nothing(mesh):
    x = input_with_one_largest()
    values, expected_amax = reference.quantize(x, E4M3, SCALE)
    x = place(mesh, P("data", "model"), x)
    compiled = jax.jit(lambda x: quantize_transpose(x, CAST)).lower(x).compile()
    pair = compiled(x)
    assert_same_bits(pair.rowwise.values, values)
    assert_same_bits(pair.columnwise.values, values.T)
    assert_same_bits(pair.amax, expected_amax)
    assert pair.columnwise.values.sharding.is_equivalent_to(NamedSharding(mesh, P("model", "data")), 2)
    assert not re.search(r"all-gather|all-to-all|collective-permute", compiled.as_text())
    assert "all-reduce" in compiled.as_text()  # the amax


def test_amax_without_jit():
    mesh, x = make_mesh(), input_with_one_largest()
    with jax.set_mesh(mesh):
        for spec in SPECS:
            assert_same_bits(amax(place(mesh, spec, x)), np.float32(99))


# Shardings of a (m, k) and b (n, k), and of the result on an Explicit mesh.
GEMM_SPECS = {
    "rows": (P("data", None), P(None, None), P("data", None)),
    "column_parallel": (P("data", None), P("model", None), P("data", "model")),
    "row_parallel": (P("data", "model"), P(None, "model"), P("data", None)),
    "contraction_in_a_only": (P(None, ("data", "model")), P(None, None), P(None, None)),
    "contraction_in_b_only": (P(None, None), P(None, "data"), P(None, None)),
    "one_axis_wanted_twice": (P("data", None), P("data", None), P("data", None)),
    "weight_gradient": (P(None, "data"), P("model", "data"), P(None, "model")),
}


@pytest.mark.parametrize(("a_spec", "b_spec", "result_spec"), GEMM_SPECS.values(), ids=GEMM_SPECS)
def test_matmul(mesh, a_spec, b_spec, result_spec):
    a, b, bias = integers(0, 32, 64, dtype=E4M3), integers(1, 16, 64, dtype=E4M3), integers(2, 16)
    expected = reference.matmul(a, b, 0.5, 2.0, bias=bias).astype(np.float32)

    def product(a, b, bias):
        return matmul(Fp8Array(a, jnp.float32(0.5)), Fp8Array(b, jnp.float32(2)), dtype=jnp.float32, bias=bias)

    d = jax.jit(product)(place(mesh, a_spec, a), place(mesh, b_spec, b), place(mesh, P(), bias))
    assert_same_bits(d, expected)  # a bias added once per shard would show
    if mesh.axis_types[0] == AxisType.Explicit:
        assert d.sharding.is_equivalent_to(NamedSharding(mesh, result_spec), 2)


def test_manual_shards_are_operated_on_as_they_are():
    mesh, x = make_mesh(), input_with_one_largest()

    def shard(x):
        pair = quantize_rowwise(x, CAST)
        return pair.rowwise.values, lax.pmax(pair.amax, ("data", "model")), pair.amax[None, None]

    spec = P("data", "model")
    with jax.set_mesh(mesh):
        on_shards = jax.jit(jax.shard_map(shard, out_specs=(spec, P(), spec), in_specs=spec, check_vma=False))
        values, whole, each = on_shards(place(mesh, spec, x))
    assert_same_bits(values, reference.quantize(x, E4M3, SCALE)[0])
    assert_same_bits(whole, np.float32(99))
    shards = x.reshape(4, 8, 2, 32).swapaxes(1, 2)
    assert_same_bits(each, np.array([[reference.amax(shards[i, j]) for j in range(2)] for i in range(4)]))


def test_manual_contraction_is_summed_by_the_user():
    mesh = make_mesh()
    a, b = integers(0, 32, 64, dtype=E4M3), integers(1, 16, 64, dtype=E4M3)

    def shard(a, b):
        return lax.psum(matmul(Fp8Array(a, jnp.float32(1)), Fp8Array(b, jnp.float32(1)), dtype=jnp.float32), "model")

    specs = P("data", "model"), P(None, "model")
    with jax.set_mesh(mesh):
        sharded = jax.shard_map(shard, in_specs=specs, out_specs=P("data", None), check_vma=False)
        d = jax.jit(sharded)(place(mesh, specs[0], a), place(mesh, specs[1], b))
    assert_same_bits(d, reference.matmul(a, b).astype(np.float32))


def test_explicit_axes_inside_manual_ones():
    """As in a pipeline: one axis is manual, the other is left to the types."""
    mesh, x = make_mesh(), input_with_one_largest()

    def stage(x):
        pair = quantize_rowwise(x, CAST)
        return pair.rowwise.values, pair.amax[None]

    with jax.set_mesh(mesh):
        how = {"in_specs": P("data"), "out_specs": P("data"), "axis_names": {"data"}, "check_vma": False}
        values, each = jax.jit(jax.shard_map(stage, **how))(place(mesh, P("data", "model"), x))
    assert_same_bits(values, reference.quantize(x, E4M3, SCALE)[0])
    assert_same_bits(each, np.array([reference.amax(rows) for rows in x.reshape(4, 8, 64)]))  # over all of "model"


LINEAR_SPECS = {
    "data_parallel": (P("data", None, None), P(None, None), P(None)),
    "column_parallel": (P("data", None, None), P(None, "model"), P("model")),
    "row_parallel": (P("data", None, "model"), P("model", None), P(None)),
    "fsdp": (P("data", None, None), P("data", None), P(None)),
}


def linear_and_gradients(x, parameters, dy):
    gemm = Fp8Gemm(CurrentScaling(power_2_scale=True), "dense")
    (y, amaxes), pullback = jax.vjp(lambda x, parameters: linear(x, parameters, gemm, jnp.float32), x, parameters)
    return y, amaxes, pullback((dy, jnp.zeros_like(amaxes)))


@pytest.mark.parametrize("case", LINEAR_SPECS)
def test_linear_and_its_gradients(mesh, case):
    x_spec, kernel_spec, bias_spec = LINEAR_SPECS[case]
    x, kernel, bias, dy = integers(0, 8, 16, 32), integers(1, 32, 48), integers(2, 48), integers(3, 8, 16, 48)
    parameters = LinearParameters(place(mesh, kernel_spec, kernel), place(mesh, bias_spec, bias))
    dy_spec = P("data", None, kernel_spec[1])
    placed = place(mesh, x_spec, x), parameters, place(mesh, dy_spec, dy)
    y, amaxes, (dx, gradients) = jax.jit(linear_and_gradients)(*placed)
    jax.tree.map(assert_same_bits, (y, amaxes, dx), (x @ kernel + bias, np.float32([3, 3]), dy @ kernel.T))
    assert_same_bits(gradients.kernel, x.reshape(-1, 32).T @ dy.reshape(-1, 48))
    assert_same_bits(gradients.bias, dy.sum((0, 1)))
    if mesh.axis_types[0] == AxisType.Explicit:
        for gradient, spec in ((dx, x_spec), (gradients.kernel, kernel_spec), (gradients.bias, bias_spec)):
            assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, spec), gradient.ndim)


@pytest.fixture
def kernels_on_cpu(monkeypatch):
    """The first of the two forms runs, as on CUDA; it is written in `jnp` by the test."""
    monkeypatch.setattr(dispatch, "_on_platform", lambda kernel, reference, *args: kernel(*args))


def never(*args, split):
    raise AssertionError("the kernel runs in this test")


def rows_times_columns(a, b, split):
    axes = split_axes(split, "k")
    return (lax.psum(a @ b.T, axes) if axes else a @ b.T,)


@pytest.mark.parametrize(("a_spec", "b_spec", "result_spec"), GEMM_SPECS.values(), ids=GEMM_SPECS)
def test_a_kernel_is_partitioned_by_its_rule(mesh, kernels_on_cpu, a_spec, b_spec, result_spec):
    a, b = integers(0, 32, 64), integers(1, 16, 64)
    shapes = set()

    def kernel(a, b, split):
        shapes.add((a.shape, b.shape))
        return rows_times_columns(a, b, split)

    fn = jax.jit(lambda a, b: dispatch.dispatch("m k, n k -> m n", kernel, never, a, b)[0])
    assert_same_bits(fn(place(mesh, a_spec, a), place(mesh, b_spec, b)), a @ b.T)
    shard = np.prod(NamedSharding(mesh, a_spec).shard_shape(a.shape))
    assert min(np.prod(a_shape) for a_shape, _ in shapes) <= shard  # it ran on the shard, not on the gathered array


def test_a_rule_without_its_collective_would_be_noticed(mesh, kernels_on_cpu):
    a, b = integers(0, 32, 64), integers(1, 16, 64)
    fn = jax.jit(lambda a, b: dispatch.dispatch("m k, n k -> m n", lambda a, b, split: (a @ b.T,), never, a, b)[0])
    d = fn(place(mesh, P(None, "model"), a), place(mesh, P(None, "model"), b))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(d, a @ b.T)


@pytest.mark.parametrize("case", GEMM_SPECS)
def test_without_a_kernel_the_reference_is_split(mesh, case):
    (a_spec, b_spec, _), a, b = GEMM_SPECS[case], integers(0, 32, 64), integers(1, 16, 64)
    fn = jax.jit(lambda a, b: dispatch.dispatch("m k, n k -> m n", None, rows_times_columns, a, b)[0])
    assert_same_bits(fn(place(mesh, a_spec, a), place(mesh, b_spec, b)), a @ b.T)


@pytest.fixture
def nobody_warned(monkeypatch):
    for name in ("kernels_run", "_warn_of_reference"):
        monkeypatch.setattr(dispatch, name, functools.cache(getattr(dispatch, name).__wrapped__))


@pytest.mark.parametrize(
    ("backend", "missing", "capability", "runs", "warning"),
    [
        ("gpu", None, "9.0", True, None),
        ("gpu", None, "8.9", True, None),
        ("gpu", None, "8.0", False, "slow jnp reference: .* 8.9 or newer, this GPU has 8.0; use recipe=None"),
        ("gpu", "built without nvcc", "9.0", False, "slow jnp reference: built without nvcc"),
        ("cpu", None, "", True, None),  # compiling for a GPU elsewhere
        ("cpu", "built without nvcc", "", False, None),  # nobody expects kernels here
    ],
)
def test_kernels_run_or_a_warning_says_why_not(nobody_warned, monkeypatch, backend, missing, capability, runs, warning):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    monkeypatch.setattr(extension, "missing_reason", lambda: missing)
    with pytest.warns(UserWarning, match=warning) if warning else contextlib.nullcontext():
        assert dispatch.kernels_run() is runs
    with warnings.catch_warnings(action="error"):  # once is enough
        assert dispatch.kernels_run() is runs


def double(x, split):
    return (x * 2.0,)


def apply(x, kernel):
    return dispatch.dispatch("m n -> m n", kernel, lambda x, split: (jnp.sin(x),), x)[0]


def lowered(platform, fn) -> str:
    return jax.jit(fn).trace(jnp.ones((16, 16))).lower(lowering_platforms=(platform,)).as_text()


def test_cuda_is_given_the_kernel_and_the_cpu_the_reference(nobody_warned, monkeypatch):
    monkeypatch.setattr(extension, "missing_reason", lambda: None)
    cuda, cpu = (lowered(platform, lambda x: apply(x, double)) for platform in ("cuda", "cpu"))
    assert "multiply" in cuda and "sine" not in cuda
    assert "sine" in cpu and "multiply" not in cpu


def test_without_a_kernel_cuda_is_given_the_reference(with_kernels):
    assert "sine" in lowered("cuda", lambda x: apply(x, None))
    by_tile, by_one = (lowered("cuda", lambda x, cast=cast: quantize_transpose(x, cast)) for cast in (BY_TILE, CAST))
    assert "custom_call" not in by_tile and "custom_call @jax_fp8_quantize_transpose" in by_one
    product = lowered("cuda", lambda x: matmul(*[quantize_rowwise(x, BY_TILE).rowwise] * 2))
    assert "custom_call" not in product and "dot_general" in product


@pytest.mark.parametrize("run", [lambda x: apply(x, None), lambda x: quantize_transpose(x, BY_TILE)])
def test_without_a_kernel_somebody_with_a_gpu_is_told_once(run, nobody_warned, monkeypatch):
    x = jnp.ones((16, 16))
    with warnings.catch_warnings(action="error"):
        run(x)  # on a CPU nobody expects kernels
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        with pytest.warns(UserWarning, match="scales by tile run on the slow jnp reference: kernels know E4M3"):
            run(x)
        run(x)


def test_as_many_arrays_as_the_rule_names():
    with pytest.raises(ValueError, match="zip"):
        dispatch.dispatch("m n -> m n", double, double, jnp.ones((2, 2)), jnp.ones((2, 2)))
