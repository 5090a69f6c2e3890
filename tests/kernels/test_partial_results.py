"""A device makes its part of a result, on both kinds of mesh; and kernels under `vmap` run on shards."""

import jax
import numpy as np
import pytest
import reference
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import E4M3
from jax_fp8.kernels import dispatch
from jax_fp8.kernels.dispatch import gathered
from jax_fp8.kernels.partial_results import PartialResult
from jax_fp8.kernels.quantize import quantize_rowwise

pytestmark = pytest.mark.versions


def make_mesh(axis_type=AxisType.Explicit) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)


def place(mesh, spec, array) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, spec))


def integers(seed, *shape) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).integers(-3, 4, shape), np.float32)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    mesh = make_mesh(request.param)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def kernels_on_cpu(monkeypatch):
    """The first of the two forms runs, as on CUDA; it is written in `jnp` by the test."""
    monkeypatch.setattr(dispatch, "_on_platform", lambda kernel, reference, *args: kernel(*args))


def never(*args, split):
    raise AssertionError("the kernel runs in this test")


def some_columns(a, b, split):
    """Columns 16 to 80 of a product, of shards those that are this device's."""
    b = gathered(b, split, "p")
    first, count = 16, 64
    if split.get("n"):
        count //= lax.axis_size(split["n"])
        first += lax.axis_index(split["n"]) * count
    return (a @ lax.dynamic_slice_in_dim(b, first, count).T,)


@pytest.mark.parametrize("b_spec", [P(None, None), P("model", None), P("data", None)], ids=str)
def test_a_device_makes_its_part_of_a_result(mesh, kernels_on_cpu, b_spec):
    a, b, widths = integers(0, 32, 64), integers(1, 96, 64), set()

    def kernel(a, b, split):
        (d,) = some_columns(a, b, split)
        widths.add(d.shape[1])
        return (d,)

    part = PartialResult("n", of="p", size=64, axes=("model",))
    wanted = NamedSharding(mesh, P("data", "model"))
    fn = jax.jit(lambda *x: dispatch.dispatch("m k, p k -> m n", kernel, never, *x, part=part)[0], out_shardings=wanted)
    assert_same_bits(fn(place(mesh, P("data", None), a), place(mesh, b_spec, b)), (a @ b.T)[:, 16:80])
    assert 32 in widths  # of two shards


def test_a_part_that_cannot_be_split_is_whole():
    mesh, of = make_mesh(), PartialResult("n", of="p", size=64)
    assert of.can_be(mesh, ("model",), {"m": ("data",)}) and of.can_be(mesh, ("model",), {"p": ("model",)})
    assert not of.can_be(mesh, ("data",), {"k": ("data",)})  # partial sums of other columns
    assert not of.can_be(mesh, (), {})
    assert not PartialResult("n", of="p", size=16).can_be(mesh, ("model",), {})  # GEMMs want multiples of 16


def test_a_kernel_under_vmap_on_explicit_shards(with_kernels):
    """As for layers stacked by `nn.scan`, whose weights are cast together."""
    mesh, x = make_mesh(), np.stack([integers(0, 32, 64), 2 * integers(1, 32, 64)])
    pair = jax.jit(jax.vmap(lambda x: quantize_rowwise(x, Cast.with_scale(E4M3, 0.3))))(place(mesh, P(None, "data"), x))
    assert_same_bits(pair.rowwise.values, np.stack([reference.quantize(each, E4M3, 0.3)[0] for each in x]))
    assert_same_bits(pair.amax, np.float32([3, 6]))
