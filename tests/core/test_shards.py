"""What a layer finds out while it is traced for one device of several, and what it says before that."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import on_devices
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

from jax_fp8.core import shards
from jax_fp8.core.shards import ParamSharding, Shards, TensorParallel

pytestmark = pytest.mark.versions

KERNEL, OTHER = ("layer", "kernel"), ("other", "kernel")
TENSOR = TensorParallel("tensor", 4)
VIEW = Shards(("data",), TENSOR, {KERNEL: -1, OTHER: None}, 2)


def test_rows_of_a_layer_with_sequence_parallelism():
    sequence = TensorParallel("tensor", 4, sequence=True)
    assert sequence.all_rows((2, 8)) == (2, 32) and sequence.own_rows((2, 32)) == (2, 8)
    assert TENSOR.all_rows((2, 8)) == TENSOR.own_rows((2, 8)) == (2, 8)


def test_outside_of_a_step_on_shards_there_is_nothing_to_know():
    assert shards.current_tensor() is None and shards.current_amax_axes() == ()
    assert shards.parts_of(KERNEL, -1) == 1 and shards.split_dim_of(KERNEL) is None and shards.parts_of_batch() == 1
    x = jnp.float32(3)
    assert shards.sum_over_batch(x) is x and shards.largest_amax(x, ()) is x


def test_inside_a_layer_knows_its_part():
    with VIEW.active():
        assert shards.current_tensor() is TENSOR
        assert shards.current_amax_axes() == ("data", "tensor") and shards.parts_of_batch() == 2
        assert shards.parts_of(KERNEL, -1) == 4 and shards.parts_of(KERNEL, -2) == 1
        assert shards.split_dim_of(KERNEL) == "columns" and shards.split_dim_of(OTHER) is None
        with pytest.raises(ValueError, match=r"at its path .* got model/kernel, .* apply the model to all variab"):
            shards.parts_of(("model", "kernel"), -1)
    assert shards.current_tensor() is None


def test_without_tensor_no_param_is_looked_up():
    with Shards(("data",), None, {}, 2).active():
        assert shards.split_dim_of(("unknown",)) is None and shards.current_amax_axes() == ("data",)


def test_offers_are_collected_also_from_a_jitted_function_that_was_traced_before():
    @jax.jit
    def layer(x):
        shards.declare_sharding(KERNEL, ParamSharding(-1, 8))
        return x

    jax.eval_shape(layer, jnp.ones(2))
    with shards.declared_shardings() as found:
        jax.eval_shape(layer, jnp.ones(2))
    assert found == {KERNEL: ParamSharding(-1, 8)}
    shards.declare_sharding(OTHER, ParamSharding())
    assert OTHER not in found


def test_a_jitted_function_is_traced_anew_on_shards():
    parts = jax.jit(lambda x: x * shards.parts_of_batch())
    assert parts(1) == 1
    with VIEW.active():
        assert parts(1) == 2
    assert parts(1) == 1


over_data = partial(on_devices, data=4, in_specs=P("data"), out_specs=P("data"))


@pytest.mark.parametrize("last", [4.0, jnp.inf, jnp.nan])
def test_the_largest_amax_of_all_devices(last):
    amaxes = jnp.float32([0, 1e-40, last, 3])
    found = over_data(lambda x: shards.largest_amax(x, ("data",)), amaxes)
    assert jnp.array_equal(found, jnp.full(4, last, jnp.float32), equal_nan=True)


def test_a_sum_over_the_parts_of_the_batch():
    with VIEW.active():
        found = over_data(lambda x: shards.sum_over_batch(x), jnp.arange(4.0))
    assert found.tolist() == [6.0] * 4


def test_sums_are_scattered_in_one_place():
    package = Path(shards.__file__).parents[1]
    calling = [path for path in package.rglob("*.py") if "lax.psum_scatter(" in path.read_text()]
    assert calling == [Path(shards.__file__)]


@pytest.mark.parametrize("axes", ["data", "fsdp", ("data", "fsdp"), ("fsdp", "data")])
def test_a_sum_is_scattered_alike_without_a_reduce_scatter(axes, monkeypatch):
    """As it is between processes of CPUs: over two axes, too, each device has the part that it would have."""
    x, of_each = jax.random.normal(jax.random.key(0), (4, 3, 8)), P(("data", "fsdp"))

    def scattered():
        own = partial(shards.scattered_sum, axes=axes, dim=2)
        return np.asarray(on_devices(own, x, data=2, fsdp=2, in_specs=of_each, out_specs=of_each))

    wanted = scattered()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(lax, "psum_scatter", None)
    assert_same_bits(scattered(), wanted)
    assert not np.array_equal(np.roll(wanted, 1, axis=0), wanted)  # another device's part is noticed
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(TypeError, match="not callable"):
        scattered()
