"""Moments in few bits on a mesh: every element is rounded as one device would round it, wherever it lies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.kernels import adam, dispatch, draws
from jax_fp8.optim.updates import InPlace

AXES = {"data": 2, "fsdp": 2, "tensor": 2}
LEAVES = {
    "scalar": ((), P()),
    "vector": ((16,), P("fsdp")),
    "rows": ((16, 12), P(("data", "fsdp"))),
    "columns": ((6, 16), P(None, "tensor")),
    "both": ((8, 16), P("fsdp", "tensor")),
    "both, the other way": ((8, 16), P("tensor", ("data", "fsdp"))),
    "the middle": ((3, 8, 5), P(None, "fsdp")),
    "three dims": ((4, 6, 10), P("data", "tensor", "fsdp")),
    "whole": ((5, 7), P()),
}
MOMENTS = pytest.mark.parametrize(
    ("mu_dtype", "nu_dtype"), [(jnp.bfloat16, jnp.bfloat16), (fp8.E4M3, fp8.E5M2)], ids=["16 bits", "8 bits"]
)


def placed(kind, tree):
    """Every leaf split as LEAVES says, on a mesh whose axes are of this kind."""
    if kind is None:
        return tree
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(kind,) * len(AXES))
    return {name: jax.device_put(leaf, NamedSharding(mesh, LEAVES[name][1])) for name, leaf in tree.items()}


def normal(seed, names=tuple(LEAVES)):
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(random.normal(size=LEAVES[name][0]), jnp.float32) for name in names}


def two_steps(tx, kind, in_place, names=tuple(LEAVES)):
    params = placed(kind, normal(0, names))
    extra = {} if in_place is None else {"in_place": in_place}

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **extra)
        return fp8.apply_updates(params, updates), state

    state = tx.init(params)
    for seed in (1, 2):
        params, state = step(params, state, placed(kind, normal(seed, names)))
    return jax.device_get((params, state))


def assert_same_state(got, wanted):
    for (path, array), expected in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(array, expected) or array.dtype == np.float32, path
        np.testing.assert_allclose(np.asarray(array, np.float32), np.asarray(expected, np.float32), rtol=1e-6)


@MOMENTS
@pytest.mark.parametrize("in_place", [None, InPlace()], ids=["deltas", "in_place"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.versions
def test_bits_of_one_device(kind, in_place, mu_dtype, nu_dtype):
    tx, names = fp8.fused_adam(1e-2, mu_dtype=mu_dtype, nu_dtype=nu_dtype), tuple(LEAVES)
    if kind == AxisType.Explicit and mu_dtype == fp8.E4M3:
        names = tuple(
            name for name in LEAVES if name not in ("the middle", "three dims")
        )  # amaxes of these are refused
    assert_same_state(two_steps(tx, kind, in_place, names), two_steps(tx, None, in_place, names))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_a_kernel_is_told_where_its_shards_lie(kind, monkeypatch):
    """The compiler partitions a kernel's call on Auto axes; here the reference stands for it. An index counted from the
    first element of each shard is the negative control."""
    tx = fp8.fused_adam(1e-2, mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16)
    of_one = two_steps(tx, None, InPlace())
    monkeypatch.setattr(dispatch, "_on_platform", lambda kernel, _, *args: kernel(*args))
    monkeypatch.setattr(adam, "_kernel", partial(told, adam._reference))
    jax.clear_caches()
    dispatch._traced_once.cache_clear(), dispatch._traced_once_on_shards.cache_clear()
    assert_same_state(two_steps(tx, kind, InPlace()), of_one)
    monkeypatch.setattr(adam.Place, "on_shard", lambda shape, *_: draws.Place.of_all(shape))
    dispatch._traced_once.cache_clear(), dispatch._traced_once_on_shards.cache_clear()
    with pytest.raises(AssertionError):
        assert_same_state(two_steps(tx, kind, InPlace()), of_one)


def told(reference, *args, **settings):
    """The reference, which needs what the kernel is told to be possible."""
    shapes = [of_leaf["g"].shape for of_leaf in adam._by_leaf(args[4], args[5])]
    assert draws.place_words(shapes, args[8]).shape == (len(LEAVES), draws.PLACE_WORDS)
    return reference(*args, **settings)
