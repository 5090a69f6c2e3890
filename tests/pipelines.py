"""A user's own loss in layers, and comparisons of steps on meshes with `pipe` with the same steps without it.

If `pipe` is the only difference, two steps differ only in the order of sums. So the FP8 state has the same bits, and
gradients differ by roundings of float32.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import hybrid
import jax
import jax.numpy as jnp
import numpy as np
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.core.recipe import Recipe

WIDTH = 32
SAME = 1e-6  # sums of float32 in another order
DELAYED, CURRENT = fp8.DelayedScaling(amax_history_len=4), fp8.CurrentScaling()


class Tanh(nn.Module):
    """A layer; with `remat` one of its GEMMs is hidden in a `jax.checkpoint`."""

    recipe: Recipe | None
    hidden: int = WIDTH
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        down = nn.remat(fp8.Dense) if self.remat else fp8.Dense
        up = fp8.Dense(self.hidden, recipe=self.recipe, tensor_split="columns", name="up")
        return x + down(WIDTH, recipe=self.recipe, tensor_split="rows", name="down")(nn.tanh(up(x)))


class Part(nn.Module):
    """A module that contains one module, under a given name."""

    make: Callable[..., nn.Module]
    of: str

    @nn.compact
    def __call__(self, x):
        return self.make(name=self.of)(x)


def layers(recipe: Recipe | None, count: int = 2, **fields: Any) -> dict[str, Callable]:
    """The makers of `count` layers, by name."""
    return {f"layer_{number}": partial(Tanh, recipe, **fields) for number in range(count)}


def dense(recipe: Recipe | None) -> Callable[..., nn.Module]:
    return partial(fp8.Dense, WIDTH, recipe=recipe)


def loss_of(parts: Mapping[str, Callable]) -> fp8.LayeredLoss:
    """The mean square of the output of "first", "layer_0", ..., "last"; "first" and "last" are optional."""

    def apply(variables, x, name):
        return Part(parts[name], name).apply(variables, x) if name in parts else x

    def first(variables, x):
        return apply(variables, x.astype(jnp.bfloat16), "first")

    def last(variables, x, batch):
        y: Any = apply(variables, x, "last")
        return jnp.mean(jnp.square(y.astype(jnp.float32) - batch[:, ::-1]))

    return fp8.LayeredLoss(tuple(name for name in parts if name.startswith("layer")), first, apply, last)


def variables_of(parts: Mapping[str, Callable]) -> dict[str, dict]:
    found: dict[str, dict] = {"params": {}, "fp8": {}}
    for number, (name, make) in enumerate(parts.items()):
        of_part = Part(make, name).init(jax.random.key(number), jnp.zeros((16, WIDTH), jnp.bfloat16))
        for collection, tree in of_part.items():
            found[collection] |= tree
    return {collection: tree for collection, tree in found.items() if tree}


def rows(count: int = 64) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, WIDTH)).astype(np.float32)


def assert_is_same_step(state: fp8.TrainState, loss: float, wanted: fp8.TrainState, wanted_loss: float) -> None:
    """Two first steps, with the optimizer `hybrid.showing`, are the same."""
    np.testing.assert_allclose(loss, wanted_loss, SAME)
    jax.tree.map(assert_same_bits, state.fp8, wanted.fp8)
    assert_same_gradients(hybrid.gradients_of(state), hybrid.gradients_of(wanted))


def assert_same_gradients(gradients: Any, wanted: Any) -> None:
    """To `SAME` of its norm each; but the bias of a query or key, whose gradient is next to nothing or nothing, and
    noise of attention in bfloat16, to that of the value's bias.
    """
    sizes = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}
    far = {}
    for path, got in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path)
        like = re.sub(r"\['(query|key)'\]\['bias'\]", "['value']['bias']", name)
        error = np.linalg.norm(np.float64(got) - sizes[name]) / np.linalg.norm(sizes[like])
        far |= {} if error <= SAME else {name: error}
    assert not far, far
