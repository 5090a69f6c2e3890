"""Transposed, the bytes are those of NumPy's transpose, on one device and on several, and nothing is gathered."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.kernels import dispatch
from jax_fp8.kernels.transpose import TARGET, transpose

DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
AXIS_TYPES = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
TRANSFORMS = pytest.mark.parametrize(
    "transform", [pytest.param(lambda fn: fn, id="eager"), pytest.param(jax.jit, id="jit")]
)
COLLECTIVES = r"all-gather|all-to-all|collective-permute|all-reduce"


def every_pattern(*shape, dtype=E4M3) -> np.ndarray:
    """All 256 bytes over and over: every NaN, both zeros, and in E5M2 the infinities."""
    count = int(np.prod(shape))
    return (np.arange(count) % 256).astype(np.uint8).view(np.dtype(dtype)).reshape(shape)


@DTYPES
@TRANSFORMS
@pytest.mark.parametrize("shape", [(16, 32), (33, 65), (1, 300), (300, 1), (0, 5), (5, 0)], ids=str)
def test_every_bit_pattern(shape, transform, dtype):
    x = every_pattern(*shape, dtype=dtype)
    assert_same_bits(transform(transpose)(jnp.asarray(x)), x.T)


def test_another_order_is_noticed():
    x = every_pattern(16, 32)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(transpose(jnp.asarray(x)), x.reshape(32, 16))


@DTYPES
def test_twice_is_nothing(dtype):
    x = every_pattern(48, 80, dtype=dtype)
    assert_same_bits(jax.jit(lambda x: transpose(transpose(x)))(jnp.asarray(x)), x)


@pytest.fixture(params=["reference", "kernel"])
def seen(request, monkeypatch):
    """The shapes that the kernel is given, which runs in the second form, written in `jnp`."""
    if request.param == "reference":
        return None
    shapes = []
    request.getfixturevalue("traced_anew")

    def ffi_call(target, result):
        def call(x):
            assert (target, result.shape, result.dtype) == (TARGET, x.shape[::-1], x.dtype)
            shapes.append(x.shape)
            return x.T

        return call

    monkeypatch.setattr(dispatch, "_on_platform", lambda kernel, reference, *args: kernel(*args))
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    return shapes


@pytest.mark.parametrize("batch", [(3,), (2, 3)], ids=str)
def test_vmapped(batch, seen):
    x = every_pattern(*batch, 16, 48)
    mapped = transpose
    for _ in batch:
        mapped = jax.vmap(mapped)
    assert_same_bits(jax.jit(mapped)(jnp.asarray(x)), x.swapaxes(-1, -2))
    assert seen is None or set(seen) == {(16, 48)}


# What splits a matrix (32, 64), and the shape of a shard.
SPLITS = {
    "rows": (P("data"), (8, 64)),
    "columns": (P(None, "model"), (32, 32)),
    "both": (P("data", "model"), (8, 32)),
    "rows by two axes": (P(("data", "model")), (4, 64)),
    "nothing": (P(), (32, 64)),
}


def make_mesh(axis_type) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)


@pytest.mark.versions
@AXIS_TYPES
@pytest.mark.parametrize(("spec", "shard"), SPLITS.values(), ids=SPLITS)
def test_shards_are_transposed_where_they_are(spec, shard, axis_type, seen):
    x, mesh = every_pattern(32, 64, dtype=E5M2), make_mesh(axis_type)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        compiled = jax.jit(transpose).lower(placed).compile()
        result = compiled(placed)
    assert_same_bits(result, x.T)
    rows, columns = (*spec, None, None)[:2]
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P(columns, rows)), 2)
    assert not re.search(COLLECTIVES, compiled.as_text())
    assert seen is None or shard in seen


@AXIS_TYPES
def test_a_gather_would_be_seen(axis_type):
    x, mesh = every_pattern(32, 64), make_mesh(axis_type)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("data")))
        whole = jax.jit(lambda x: jax.sharding.reshard(transpose(x), P()), out_shardings=NamedSharding(mesh, P()))
        assert re.search(COLLECTIVES, whole.lower(placed).compile().as_text())


@pytest.mark.versions
@pytest.mark.parametrize("check_vma", [True, False])
def test_gathered_inside_a_shard_map(check_vma):
    """As sequence parallelism uses it: one orientation travels, the other is made on each device."""
    x, mesh = every_pattern(32, 64), make_mesh(AxisType.Auto)

    def local(shard):
        columns = transpose(jax.lax.all_gather(shard, "data", axis=0, tiled=True))  # (k, m)
        return transpose(shard), columns[:, None]

    specs = {"in_specs": P("data"), "out_specs": (P(None, "data"), P(None, "data")), "check_vma": check_vma}
    shards, each = jax.jit(jax.shard_map(local, mesh=mesh, **specs))(jnp.asarray(x))
    assert_same_bits(shards, x.T)
    for device in range(4):
        assert_same_bits(np.asarray(each)[:, device], x.T)


def lowered(x, platform) -> str:
    return jax.jit(transpose).trace(x).lower(lowering_platforms=(platform,)).as_text()


@DTYPES
def test_what_the_kernel_is_told(dtype, with_kernels):
    x = jax.ShapeDtypeStruct((32, 48), dtype)
    calls = re.findall(r"custom_call @(jax_fp8_\w+)\(.*\n?.*: \((.*)\) -> (.*)", lowered(x, "cuda"))
    name = {E4M3: "f8E4M3FN", E5M2: "f8E5M2"}[dtype]
    ((target, operands, results),) = calls
    assert (target, operands) == (TARGET, f"tensor<32x48x{name}>")
    assert re.findall(r"tensor<(.*?)>", results) == [f"48x32x{name}"]
    assert "jax_fp8_" not in lowered(x, "cpu")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (jnp.ones(16, E4M3), r"transpose needs a matrix, got shape \(16,\); flatten the leading dims"),
        (jnp.ones((2, 3, 4), E5M2), r"transpose needs a matrix, got shape \(2, 3, 4\); flatten"),
        (jnp.ones((2, 3), jnp.bfloat16), "transpose needs values of E4M3 or E5M2, got bfloat16; quantize first"),
        (jnp.ones((2, 3), jnp.uint8), "transpose needs values of E4M3 or E5M2, got uint8"),
        (jnp.ones((2, 3), jnp.float8_e4m3), "transpose needs values of E4M3 or E5M2, got float8_e4m3; quantize"),
    ],
)
def test_errors(x, message):
    with pytest.raises(ValueError, match=message):
        transpose(x)
