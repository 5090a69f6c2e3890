"""The units of work of a stage against the ordinary gradients of its layers, and one half of a backward after the other
against both at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import assert_close
from pipelines import CURRENT, DELAYED, SAME, WIDTH, layers, loss_of, variables_of
from reference import assert_same_bits

from jax_fp8.core.layered_loss import of_layer
from jax_fp8.core.paths import LayerPath, at_path, kernel_paths, map_with_names
from jax_fp8.core.recipe import Recipe
from jax_fp8.train.gradients import accumulate_grads, value_grads_and_amaxes, with_first_scales
from jax_fp8.train.stage_work import ChunkWork, Totals
from jax_fp8.train.weight_cache import cast_gemms

ROWS, MICROBATCHES = 64, 3
WEIGHT = 1 / MICROBATCHES
X = jax.random.normal(jax.random.key(1), (MICROBATCHES, ROWS, WIDTH), jnp.bfloat16)
DY = jax.random.normal(jax.random.key(2), X.shape, jnp.bfloat16)
RECIPES = {"delayed": DELAYED, "current": CURRENT, "bfloat16": None}


class Chunk:
    """Two layers, with scales of a first pass, and their units."""

    def __init__(self, recipe: Recipe | None, from_current=False, **fields):
        self.recipe, self.from_current = recipe, from_current
        parts = layers(recipe, **fields)
        self.loss, self.variables = loss_of(parts), variables_of(parts)
        self.gemms: dict[LayerPath, Recipe] = {
            (name, gemm): recipe for name in parts for gemm in ("up", "down") if recipe is not None
        }
        if "fp8" in self.variables:
            amaxes = value_grads_and_amaxes(self.weighted, from_current=True)(self.variables, X[0], DY[0])[2]
            self.variables["fp8"] = with_first_scales(self.variables["fp8"], amaxes, recipe)

    def weighted(self, variables, x, dy) -> jax.Array:
        """A scalar, by which the gradient of what leaves the layers is `dy`."""
        for name in self.loss.layers:
            x = self.loss.layer(of_layer(variables, name), x, name)
        return jnp.sum(x.astype(jnp.float32) * dy.astype(jnp.float32))

    def ordinary(self, variables):
        """The gradients of all microbatches by x, added up of params, and the largest amaxes."""
        def of_one(x, dy):
            def loss(given):
                params = dict(given["params"])
                return self.weighted({**given, "params": params}, params.pop("x"), dy)

            given = {**variables, "params": {**variables["params"], "x": x}}
            return value_grads_and_amaxes(loss, from_current=self.from_current)(given)[1:]

        found = [of_one(x, dy) for x, dy in zip(X, DY, strict=True)]
        dx = [gradients.pop("x") for gradients, _ in found]
        sums = jax.tree.map(lambda *of: sum(np.float32(WEIGHT) * one for one in of), *(each for each, _ in found))
        return dx, sums, jnp.max(jnp.stack([amaxes for _, amaxes in found]), 0)

    def work(self, variables) -> ChunkWork:
        """As a stage has it: weights in FP8, NaN in place of their kernels."""
        if self.gemms:
            scales = {} if self.from_current else variables.get("fp8", {})
            kernels = {kernel for gemm in self.gemms for kernel in kernel_paths(gemm)}
            params = map_with_names(
                lambda names, param: jnp.full_like(param, jnp.nan) if names in kernels else param, variables["params"]
            )
            cache = cast_gemms(variables["params"], scales, self.gemms)
            variables = {**variables, "params": params, "fp8_cache": cache}
        x = jax.ShapeDtypeStruct(X.shape[1:], X.dtype)
        return ChunkWork(self.loss, self.loss.layers, variables, self.gemms, WEIGHT, self.from_current, x)

    def by_units(self, variables):
        """The same by `backward`, and by the two halves."""
        work = self.work(variables)
        kept = [work.forward(x)[1] for x in X]
        whole, halves, of_whole, of_halves, left = work.no_totals(), work.no_totals(), [], [], []
        for of_one, dy in zip(kept, DY, strict=True):
            dx, whole = work.backward(of_one, dy, whole)
            of_whole.append(dx)
            dx, operands, halves = work.input_gradient(of_one, dy, halves)
            of_halves.append(dx)
            left.append(operands)
        for of_one, operands in zip(kept, left, strict=True):
            halves = work.weight_gradient(of_one, operands, halves)
        return (of_whole, whole), (of_halves, halves)


def rows_of(totals: Totals, chunk: Chunk) -> np.ndarray:
    """Amaxes in the order of the state."""
    found = []
    map_with_names(
        lambda names, leaf: found.append(totals.amaxes[names[:-1]][0]) if names[-1] == "scale" else None,
        chunk.variables.get("fp8", {}),
    )
    return np.concatenate(found) if found else np.zeros(0, np.float32)


CASES = {
    "delayed": (DELAYED, {}),
    "delayed, a first pass": (DELAYED, {"from_current": True}),
    "delayed, a GEMM in a jax.checkpoint": (DELAYED, {"remat": True}),
    "current": (CURRENT, {}),
    "bfloat16": (None, {}),
}
