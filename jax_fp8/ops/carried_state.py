"""State that other people's train steps carry: an argument of the product, whose cotangent is its new value.

    y = op(x, kernel, state)        jax.grad by state  →  the state of the next step

This is Flax's convention for its own FP8. A step that knows it takes gradients by the state as by params, and puts the
gradient in the place of the state. Scale and history move here, in the backward pass of each product; with
`value_and_grad` of this library they move once in an optimizer step (kernels/update_state.py), by the same kernel.

Where no gradient by the state is taken, the histories would stay empty. There each tensor is scaled by its own amax: in
validation, and in a step that does not know the convention. No way to call the product is wrong in silence.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jax_fp8.core.fp8_gemm import AmaxCotangent, Fp8Gemm, Record
from jax_fp8.core.maxima import as_float32, like
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.recorder import note_recipe
from jax_fp8.core.shards import current_amax_axes
from jax_fp8.core.types import PyTree
from jax_fp8.kernels.update_state import finish_step
from jax_fp8.kernels.vma import vary, varying_axes

# Of input, kernel and output gradient, where nothing is known yet. There is no warm start here. A gradient of a mean
# over thousands of tokens vanishes in E5M2 at a scale of 1, and so do the ones before it: a model of many layers would
# need as many steps to fill its histories. At 2**-22 all from 2**-38 to 2**-6.2 is kept.
FIRST_SCALES = np.array([1, 1, 2.0**-22], np.float32)

Op = Callable[..., jax.Array]  # op(gemm, *operands) -> result: a composite op, which is differentiable


@dataclass(frozen=True)
class CarriedGemm:
    """What is static of a product with such a state: its op, its recipe and its name in messages."""

    op: Op
    recipe: Recipe
    layer: str

    def __call__(self, operands: tuple[PyTree, ...], state: Mapping[str, jax.Array]) -> jax.Array:
        """The product, by a state `{"scale": f32[3], "amax_history": f32[3, L]}`, or {} for a recipe without state."""
        note_recipe(self.layer, self.recipe)
        if not state:
            return self.op(self.by_own_amaxes(), *operands)
        return _product(self, operands, dict(state))

    def by_own_amaxes(self) -> Fp8Gemm:
        """The GEMM in which each tensor is scaled by its own amax."""
        return Fp8Gemm(self.recipe, self.layer, is_recorded=False, amax_axes=current_amax_axes())

    def by_state(self, scales: jax.Array, vector: jax.Array) -> Fp8Gemm:
        """The GEMM with these scales f32[3], whose amaxes leave as the cotangent of `vector` f32[3]."""
        record = Record(cotangent=AmaxCotangent(vector, 0))
        return Fp8Gemm(self.recipe, self.layer, scales, record, amax_axes=current_amax_axes())


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(gemm: CarriedGemm, operands: tuple[PyTree, ...], state: dict[str, jax.Array]) -> jax.Array:
    return gemm.op(gemm.by_own_amaxes(), *operands)


def _forward(gemm: CarriedGemm, operands: PyTree, state: PyTree) -> tuple[jax.Array, tuple]:
    is_carried = all(leaf.perturbed for leaf in state.values())
    operands, state = (
        jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=lambda node: isinstance(node, CustomVJPPrimal))
        for tree in (operands, state)
    )
    if not is_carried:
        _warn_not_carried()
        y, pull_back = jax.vjp(lambda *operands: gemm.op(gemm.by_own_amaxes(), *operands), *operands)
        return y, (pull_back, state, None)
    # A layer that a step did not run has zeros as its new state, or what stands for them in a dtype of maxima. It
    # begins again.
    scale = as_float32(state["scale"])
    scale = jnp.where(scale > 0, scale, FIRST_SCALES)
    # Zeros of the state, so that under a `jax.vmap` over states each has amaxes of its own.
    vector = vary(jnp.where(False, scale, jnp.float32(0)), varying_axes(operands, scale))
    y, pull_back = jax.vjp(
        lambda vector, *operands: gemm.op(gemm.by_state(scale, vector), *operands), vector, *operands
    )
    return y, (pull_back, state, scale)


def _backward(gemm: CarriedGemm, residuals: tuple, dy: PyTree) -> tuple[PyTree, PyTree]:
    pull_back, state, scale = residuals
    if isinstance(dy, SymbolicZero):
        dy = jnp.zeros(dy.aval.shape, dy.aval.dtype)  # type: ignore[attr-defined]
    if scale is None:
        return pull_back(dy), None
    amaxes, *gradients = pull_back(dy)
    before = {"scale": scale, "amax_history": jnp.maximum(as_float32(state["amax_history"]), 0)}
    # Barriers: the update is in place. In a loop over layers XLA would let it read and write slices of two arrays.
    before = lax.optimization_barrier(before)
    after, _ = finish_step(before, lax.stop_gradient(amaxes), gemm.recipe)
    after = lax.optimization_barrier(after)
    return tuple(gradients), {name: like(state[name], value) for name, value in after.items()}


_product.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.cache
def _warn_not_carried() -> None:
    warnings.warn(
        "an FP8 product is differentiated, but not by its state, so each tensor is scaled by its own amax: right, but "
        "one more read of each; take gradients by the state too, as steps that know Flax's collection "
        '"_overwrite_with_gradient" do, or use a recipe without state',
        stacklevel=2,
    )
