"""No sequence of public calls leaves a param and its master, or a param and its FP8 copy, apart.

Hypothesis draws the sequences: steps with other microbatches, on a mesh, of another recipe; skipped steps; params that
are replaced, or edited behind the library's back; states that are saved and restored.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import serialization
from hybrid import make_mesh
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_fp8 as fp8
from jax_fp8.optim.adam_state import FusedAdamState

pytestmark = [
    pytest.mark.versions,
    pytest.mark.filterwarnings("ignore:masters in state.opt_state must round"),  # what `edit` is for
]

RATE = 2.0**-10
RECIPES = {"delayed": fp8.DelayedScaling(amax_history_len=2), "current": fp8.CurrentScaling()}
STORAGES = {
    "float32": {"param_dtype": jnp.float32},
    "bfloat16": {"param_dtype": jnp.bfloat16},
    "bfloat16 with remainder": {"param_dtype": jnp.bfloat16, "master_dtype": "remainder"},
    "float16 with float16": {"param_dtype": jnp.float16, "master_dtype": jnp.float16},
}
BATCH = np.asarray(jax.random.normal(jax.random.key(0), (32, 32)), np.float32)


class Layers(nn.Module):
    recipe: fp8.DelayedScaling | fp8.CurrentScaling
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        options = {"recipe": self.recipe, "param_dtype": self.param_dtype}
        return fp8.Dense(32, name="last", **options)(fp8.LayerNormDense(48, name="first", **options)(x))


@functools.cache
def parts_of(storage: str, recipe: str):
    """The optimizer, the model, and what it was initialised to, with the weights in FP8."""
    options = dict(STORAGES[storage])
    model = Layers(RECIPES[recipe], options.pop("param_dtype"))
    variables = dict(jax.jit(model.init)(jax.random.key(1), BATCH))
    tx = fp8.fused_adamw(RATE, skip_nonfinite=True, **options)
    return tx, model, {**variables, "fp8_cache": cast(model, variables)}


@functools.cache
def caster(model):
    """A program, for each of its operations would be one."""
    forward = lambda variables: model.apply(variables, BATCH)  # noqa: E731
    return jax.jit(lambda variables: fp8.cast_weights(variables, model.recipe, forward=forward))


def cast(model, variables):
    return caster(model)({name: tree for name, tree in variables.items() if name != "fp8_cache"})


@functools.cache
def step_of(storage: str, recipe: str, microbatches: int, devices: int):
    tx, model, _ = parts_of(storage, recipe)
    parallel = make_mesh(data=devices) if devices > 1 else None
    loss_fn = lambda variables, x: jnp.mean((model.apply(variables, x) - x) ** 2)  # noqa: E731
    return fp8.make_train_step(loss_fn, tx, model.recipe, microbatches, parallel=parallel)


def masters_of(state):
    """Pairs of a param and the master that the optimizer computes with, where there are two arrays."""
    adam = next(
        node
        for node in jax.tree.leaves(state.opt_state, is_leaf=lambda node: isinstance(node, FusedAdamState))
        if isinstance(node, FusedAdamState)
    )
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(adam.master), strict=False)
    return [(param, master) for param, master in pairs if master.dtype != jnp.uint16]


def on_one_device(state):
    """Through the host: what `jax.device_put` moves from an Explicit mesh to one device keeps the type of the mesh."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state)


def check_is_one_truth(state, model) -> None:
    for param, master in masters_of(state):
        np.testing.assert_array_equal(np.asarray(master.astype(param.dtype)), np.asarray(param))
    check_cache(state, model)


def check_cache(state, model) -> None:
    expected = cast(model, state.variables)
    jax.tree.map(lambda want, found: np.testing.assert_array_equal(*map(as_bits, (want, found))), expected, state.cache)


def as_bits(array):
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind not in "ui" else array


def check_moved(before, after) -> None:
    """An optimizer step starts from the params that were there: whatever it starts from moves, by a few rates."""
    after = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(after)]
    assert any((new != old).any() for old, new in zip(before, after, strict=True))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_less(np.abs(new - old), 10 * RATE + 2.0**-6 * np.abs(old))


class Run:
    """A state, and what may be done to it."""

    def __init__(self, storage: str):
        self.storage, self.recipe = storage, "delayed"
        tx, self.model, variables = parts_of(storage, "delayed")
        self.state = fp8.TrainState.create(variables=variables, tx=tx)

    def step(self, microbatches: int = 1, devices: int = 1):
        before = self.take_step(BATCH, microbatches, devices)
        check_moved(before, self.state.params)
        check_is_one_truth(self.state, self.model)

    def take_step(self, batch, microbatches: int = 1, devices: int = 1) -> list[np.ndarray]:
        """The params before it."""
        step = step_of(self.storage, self.recipe, microbatches, devices)
        state = step.place(self.state, batch) if devices > 1 else on_one_device(self.state)
        before = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(state.params)]
        self.state, _ = step(state, batch)
        return before

    def skip(self):
        """Twice: the first casts a param that was edited again, as each step does before it looks at its batch."""
        self.skip_once()
        before = self.bits()
        self.skip_once()
        for old, new in zip(before, self.bits(), strict=True):
            np.testing.assert_array_equal(old, new)

    def skip_once(self):
        bad = BATCH.copy()
        bad[3, 5] = np.nan
        self.take_step(bad)

    def bits(self) -> list[np.ndarray]:
        """Of every leaf but the step count."""
        return [as_bits(leaf).copy() for leaf in jax.tree.leaves(dataclasses.replace(self.state, step=()))]

    def replace(self):
        self.state = self.state.replace(params=jax.tree.map(lambda leaf: 0.25 - leaf / 2, self.state.params))
        check_cache(self.state, self.model)

    def edit(self):
        """One element in the middle, past `TrainState.replace`."""
        params = jax.tree.map(lambda leaf: leaf, self.state.params)
        kernel = params["last"]["kernel"]
        params["last"]["kernel"] = kernel.at[17, 9].set(kernel[17, 9] + 3)
        self.state = dataclasses.replace(self.state, params=params)

    def save_and_restore(self):
        self.state = serialization.from_bytes(self.state, serialization.to_bytes(self.state))
        self.state = jax.tree.map(jnp.asarray, self.state)

    def take_another_recipe(self):
        self.recipe = "current" if self.recipe == "delayed" else "delayed"
        _, self.model, variables = parts_of(self.storage, self.recipe)
        state = dataclasses.replace(
            on_one_device(self.state), fp8=jax.tree.map(jnp.copy, variables.get("fp8", {})), cache={}
        )
        self.state = dataclasses.replace(state, cache=cast(self.model, state.variables))


CALLS = {
    "step": Run.step,
    "two microbatches": lambda run: run.step(microbatches=2),
    "two devices": lambda run: run.step(devices=2),
    "skip": Run.skip,
    "replace": Run.replace,
    "edit": Run.edit,
    "save and restore": Run.save_and_restore,
    "another recipe": Run.take_another_recipe,
}


@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(calls=st.lists(st.sampled_from(sorted(CALLS)), min_size=1, max_size=6))
def test_no_sequence_of_calls_leaves_two_truths(storage, calls):
    run = Run(storage)
    for name in [*calls, "step"]:
        CALLS[name](run)


def test_a_master_or_a_copy_of_other_params_is_noticed():
    run = Run("bfloat16")
    run.step()
    for field, changed in (
        ("params", jax.tree.map(lambda leaf: leaf + 1, run.state.params)),
        ("cache", jax.tree.map(lambda leaf: leaf if leaf.dtype != fp8.E4M3 else -leaf, run.state.cache)),
    ):
        with pytest.raises(AssertionError):
            check_is_one_truth(dataclasses.replace(run.state, **{field: changed}), run.model)
    before = [np.asarray(leaf, np.float32) + 1 for leaf in jax.tree.leaves(run.state.params)]
    with pytest.raises(AssertionError):
        check_moved(before, run.state.params)
    with pytest.raises(AssertionError):
        check_moved([np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(run.state.params)], run.state.params)
