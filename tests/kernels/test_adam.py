"""One step of Adam over leaves of every kind at once, bit for bit against NumPy.

Left out are subnormal float32 numbers, which XLA's CPU compiler flushes to zero.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import assert_same_bits

from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.kernels import adam as kernel
from jax_fp8.kernels.adam import adam, adam_leaf, launches
from jax_fp8.kernels.adam_arrays import Coefficients, Leaf

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
REMAINDER = jnp.uint16


class Kind(NamedTuple):
    """What a leaf is made of; `cast` is the dtype of `values`, `orientations` how many of them there are."""

    shape: tuple
    gradient: type
    param: type | None
    master: type | None
    mu: type
    nu: type
    cast: type | None = None
    orientations: int = 0
    decays: bool = True


KINDS = [
    Kind((), F32, F32, None, F32, F32),
    Kind((1,), F16, F32, None, BF16, F32, decays=False),
    Kind((0,), F16, BF16, F32, BF16, E4M3),
    Kind((7,), F32, F16, F32, E4M3, BF16),
    Kind((48, 32), F32, F32, None, E5M2, E5M2, E4M3, 2),
    Kind((33, 65), BF16, BF16, REMAINDER, F32, BF16),
    Kind((48, 32), BF16, BF16, F32, BF16, E4M3, E4M3, 2),
    Kind((33, 65), F16, F16, F16, BF16, F32, decays=False),
    Kind((48, 32), BF16, None, F32, E4M3, E4M3, E4M3, 2),
    Kind((33, 65), F32, None, F16, F32, F32, E5M2, 1),
    Kind((7,), F32, BF16, F16, E5M2, BF16),
    Kind((48, 32), F32, BF16, REMAINDER, E4M3, E5M2, E4M3, 2, decays=False),
    Kind((33, 65), F16, F16, F32, F32, E5M2),
    Kind((2, 3, 5), F16, BF16, REMAINDER, BF16, BF16),
    Kind((), BF16, BF16, REMAINDER, E5M2, E4M3),
    Kind((0, 16), F32, None, F32, BF16, BF16, E4M3, 2),
    Kind((7,), F16, None, F32, E5M2, F32, E5M2, 1, decays=False),
    Kind((1,), BF16, F16, F16, BF16, E5M2),
    Kind((33, 65), BF16, F32, None, E4M3, BF16, E5M2, 1),
]

PLAIN = {"rate": 1e-3, "b1": 0.9, "one_minus_b1": 0.1, "b2": 0.999, "one_minus_b2": 0.001, "eps": 1e-8}
PLAIN |= {"weight_decay": 0.0, "correction1": 1.0, "correction2": 1.0, "grad_scale": 1.0, "apply": 1.0}
STEPS = {
    "plain": PLAIN,
    "corrected": PLAIN | {"correction1": 1 / (1 - 0.9**3), "correction2": 1 / (1 - 0.999**3)},
    "decays": PLAIN | {"weight_decay": 0.1, "rate": 0.3, "eps": 1e-3},
    "scaled": PLAIN | {"grad_scale": 1 / 3, "weight_decay": 0.01, "correction1": 3.7, "correction2": 367.0},
}

CAST = ("values", "values_t", "scale", "amax")
STEP = jax.jit(adam, static_argnums=3)


def coefficients(step) -> Coefficients:
    return Coefficients(**{name: jnp.float32(number) for name, number in step.items()})


def make_leaf(kind, seed) -> Leaf:
    """A leaf in the middle of a training: nothing in it is zero but a few elements; its scales are about to change."""
    random = np.random.default_rng(seed)

    def normal(size):
        x = random.normal(size=kind.shape).astype(np.float32)
        x = np.sign(x) * np.maximum(np.abs(x), 2e-4) * np.float32(size)
        if x.ndim == 2 and x.size:
            x[0, :3] = 0
        return x

    def moment(dtype, x, fp8):
        if dtype not in (E4M3, E5M2):
            return jnp.asarray(x.astype(dtype)), None
        scale = 1.1 * reference.scale_from_amax(reference.amax(fp8), dtype)
        return Fp8Array(jnp.asarray(reference.quantize(fp8, dtype, scale)[0]), jnp.float32(scale)), jnp.float32(
            scale * 1.3
        )

    gradient, m, root, master = normal(1), normal(0.1), np.abs(normal(0.3)), normal(1)
    mu, mu_scale = moment(kind.mu, m, m)
    nu, nu_scale = moment(kind.nu, np.square(root), root)
    if kind.master == REMAINDER:
        master = reference.off_the_tie(master)
        kept = jnp.asarray(reference.remainder(master))
    else:
        kept = None if kind.master is None else jnp.asarray(master.astype(kind.master))
    rounded = np.asarray(kept) if kind.master is F16 else master
    param = None if kind.param is None else jnp.asarray(rounded.astype(kind.param))
    cast = scale = None
    if kind.cast is not None:
        scale = jnp.float32(reference.scale_from_amax(reference.amax(master), kind.cast))
        values = np.full(kind.shape, 7, kind.cast)
        values_t = jnp.asarray(values.T) if kind.orientations == 2 else None
        cast = Fp8Pair.with_shared_scale(jnp.asarray(values), values_t, jnp.float32(9), jnp.float32(8))
    return Leaf(
        jnp.asarray(gradient.astype(kind.gradient)),
        mu,
        nu,
        param,
        kept,
        cast,
        scale,
        mu_scale,
        nu_scale,
        decays=kind.decays,
    )


LEAVES = [make_leaf(kind, seed) for seed, kind in enumerate(KINDS)]


def master_of(leaf) -> np.ndarray:
    if leaf.master is None:
        return np.asarray(leaf.param)
    if leaf.master.dtype != REMAINDER:
        return np.asarray(leaf.master).astype(np.float32)
    words = np.asarray(leaf.param).view(np.uint16).astype(np.int64) * 2**16 + np.asarray(leaf.master)
    words -= 2**16 * (np.asarray(leaf.master) > 2**15)
    return words.astype(np.uint32).view(np.float32).reshape(leaf.gradient.shape)


def moment_of(moment, squared=False) -> np.ndarray:
    if not isinstance(moment, Fp8Array):
        return np.asarray(moment).astype(np.float32)
    x = np.asarray(moment.values).astype(np.float32) * np.float32(moment.scale)
    return x * x if squared else x


def expect(leaf, step, seed, number, adam_w_mode, precision=np.float32):
    """The updated leaf's arrays in NumPy by name, and the update."""
    moments = moment_of(leaf.mu), moment_of(leaf.nu, squared=True)
    settings = {"decays": leaf.decays, "adam_w_mode": adam_w_mode, "precision": precision}
    results = reference.adam(leaf.gradient, master_of(leaf), *moments, step, **settings)
    m, v, p, update = (np.asarray(x, np.float32) for x in results)
    draws = reference.draws(leaf.gradient.shape, seed, number)
    arrays = {"mu": store_first(m, leaf, draws.mu), "nu": store_second(v, leaf, draws.nu)} | store_master(p, leaf)
    if leaf.cast is not None:
        weight = arrays["master"] if leaf.param is None else arrays["param"]
        arrays["values"], arrays["amax"] = reference.quantize(weight, leaf.cast.rowwise.dtype, leaf.scale)
        arrays["scale"] = leaf.scale
        if leaf.cast.columnwise is not None:
            arrays["values_t"] = arrays["values"].T
    return arrays, update


def store_first(m, leaf, draw) -> np.ndarray:
    if isinstance(leaf.mu, Fp8Array):
        return reference.quantize_at_random(m, leaf.mu.dtype, leaf.mu_scale, draw)
    return m if leaf.mu.dtype == F32 else reference.round_at_random(m, draw)


def store_second(v, leaf, draw) -> np.ndarray:
    if isinstance(leaf.nu, Fp8Array):
        return reference.quantize_root(v, leaf.nu.dtype, leaf.nu_scale, draw)
    return v if leaf.nu.dtype == F32 else reference.round_at_random(v, draw, never_zero=True)


def store_master(p, leaf) -> dict[str, np.ndarray]:
    if leaf.param is not None and leaf.param.dtype == BF16 and leaf.master.dtype != F16:
        p = reference.off_the_tie(p)
    if leaf.master is None:
        return {"param": p}
    if leaf.master.dtype == REMAINDER:
        return {"param": p.astype(BF16), "master": reference.remainder(p)}
    master = p.astype(leaf.master.dtype)
    return {"master": master} | ({} if leaf.param is None else {"param": master.astype(leaf.param.dtype)})


def array_of(leaf, name) -> np.ndarray:
    array = leaf.cast.arrays[CAST.index(name)] if name in CAST else getattr(leaf, name)
    return np.asarray(array.values if isinstance(array, Fp8Array) else array)


def assert_updated(leaf, before, arrays):
    for name, expected in arrays.items():
        assert_same_bits(array_of(leaf, name), expected)
    names = ("param", "master") if leaf.cast is None else ("param", "master", *CAST)
    for name in names:
        array = leaf.cast.arrays[CAST.index(name)] if name in CAST else getattr(leaf, name)
        assert (array is None) == (name not in arrays)
    assert (leaf.cast is None) == ("values" not in arrays)
    for name, scale in (("mu", before.mu_scale), ("nu", before.nu_scale)):
        moment = getattr(leaf, name)
        if isinstance(moment, Fp8Array):
            assert_same_bits(moment.scale, scale)


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("step", STEPS)
def test_bits(step, adam_w_mode):
    seed = 12345
    updated, _ = STEP(LEAVES, coefficients(STEPS[step]), jnp.uint32(seed), adam_w_mode)
    for number, (after, before) in enumerate(zip(updated, LEAVES, strict=True)):
        assert_updated(after, before, expect(before, STEPS[step], seed, number, adam_w_mode)[0])


@pytest.mark.parametrize("adam_w_mode", [True, False], ids=["adamw", "l2"])
def test_bits_outside_jit(adam_w_mode):
    """Every kind as a matrix, since each shape compiles anew; and a number, and nothing at all."""
    step = STEPS["scaled"]
    matrices = [make_leaf(kind._replace(shape=(4, 6)), seed) for seed, kind in enumerate(KINDS)]
    for number, before in enumerate([*matrices, LEAVES[0], LEAVES[2]]):
        after, update = adam_leaf(before, coefficients(step), jnp.uint32(3), number, adam_w_mode)
        arrays, expected_update = expect(before, step, 3, number, adam_w_mode)
        assert_updated(after, before, arrays)
        assert_same_bits(update, expected_update)
    updated, _ = adam(LEAVES[:2], coefficients(step), jnp.uint32(3), adam_w_mode)
    for number in range(2):
        assert_updated(updated[number], LEAVES[number], expect(LEAVES[number], step, 3, number, adam_w_mode)[0])


def test_one_rounding_less_would_be_noticed():
    """The negative control: NumPy in float64, rounded to float32 at the end, is near and yet has other bits."""
    number = 5
    before, step = LEAVES[number], STEPS["scaled"]
    updated, _ = STEP(LEAVES, coefficients(step), jnp.uint32(0), True)
    arrays, _ = expect(before, step, 0, number, True, precision=np.float64)
    reference.assert_close(updated[number].mu, arrays["mu"], "float32")
    for name in ("mu", "master"):
        with pytest.raises(AssertionError, match="elements differ"):
            assert_same_bits(array_of(updated[number], name), arrays[name])


def test_every_kind_of_storage_is_there_with_every_kind_of_gradient():
    moments = {F32, BF16, E4M3, E5M2}
    assert {kind.mu for kind in KINDS} == {kind.nu for kind in KINDS} == moments
    masters = {(kind.param, kind.master) for kind in KINDS}
    assert masters == {(F32, None), (None, F32), (None, F16), (BF16, REMAINDER)} | {
        (param, master) for param in (BF16, F16) for master in (F32, F16)
    }
    assert {(kind.gradient, kind.param) for kind in KINDS} == {
        (gradient, param) for gradient in (F32, BF16, F16) for param in (F32, BF16, F16, None)
    }


@pytest.mark.parametrize("elements", [1, 5000])
def test_several_launches_have_the_bits_of_one(monkeypatch, elements):
    """Also where values are rounded at random, which depends on the number of a leaf in the tree."""
    monkeypatch.setattr(kernel, "LAUNCH_ELEMENTS", elements)
    spans = list(launches([leaf.gradient.size for leaf in LEAVES], []))
    assert 1 < len(spans) <= len(LEAVES) and [leaf for span in spans for leaf in range(*span)] == [*range(len(LEAVES))]
    args = LEAVES, coefficients(PLAIN), jnp.uint32(7)
    several, _ = jax.jit(lambda *args: adam(*args, True))(*args)
    jax.tree.map(assert_same_bits, several, STEP(*args, True)[0])
    numbered_anew = jax.jit(lambda *args: adam(*args, True))([LEAVES[0], *LEAVES], *args[1:])[0][1:]
    with pytest.raises(AssertionError):  # the control
        jax.tree.map(assert_same_bits, numbered_anew, several)


def test_launches_keep_shared_casts_together(monkeypatch):
    monkeypatch.setattr(kernel, "LAUNCH_ELEMENTS", 10)
    assert list(launches([4, 4, 4, 4, 20, 1, 1], [])) == [(0, 2), (2, 4), (4, 5), (5, 7)]
    assert list(launches([4, 4, 4, 4, 20, 1, 1], [(3, 1)])) == [(0, 4), (4, 5), (5, 7)]
    assert list(launches([4, 4, 4], [(2, 0, 1)])) == [(0, 3)]
    assert list(launches([], [])) == []


def test_a_step_that_is_not_applied_changes_nothing():
    poisoned = [replace(leaf, gradient=leaf.gradient * jnp.nan) for leaf in LEAVES]
    updated, _ = STEP(poisoned, coefficients(PLAIN | {"apply": 0.0}), jnp.uint32(0), True)
    for after, before in zip(updated, LEAVES, strict=True):
        after = replace(after, gradient=before.gradient)
        jax.tree.map(assert_same_bits, after, before)
    updated, _ = STEP(poisoned, coefficients(PLAIN), jnp.uint32(0), True)
    assert np.isnan(np.asarray(updated[0].param))


def test_a_number_that_is_not_finite_stays_in_its_element():
    leaves = [leaf for leaf in LEAVES if leaf.gradient.size > 1]
    for bad in (np.inf, -np.inf, np.nan):
        poisoned = [replace(leaf, gradient=jnp.where(element_five(leaf), bad, leaf.gradient)) for leaf in leaves]
        updated, _ = STEP(poisoned, coefficients(PLAIN), jnp.uint32(0), True)
        for after in updated:
            weight = array_of(after, "master" if after.param is None else "param").astype(np.float32).reshape(-1)
            assert list(np.flatnonzero(np.isnan(weight))) == [5]


def element_five(leaf) -> np.ndarray:
    return np.arange(leaf.gradient.size).reshape(leaf.gradient.shape) == 5


def test_no_leaves():
    assert adam([], coefficients(PLAIN), jnp.uint32(0), True) == ([], [])
