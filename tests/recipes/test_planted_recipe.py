"""A recipe that the library has never heard of trains a GPT: what a recipe decides, it decides in one value.

The planted one is stateless, has a scale for every 128 elements along the dim that a GEMM contracts, and rounds it up
to a power of four. Nothing outside of this file knows it: not the layers, not the step, not the head.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import HYBRID, INPUT, KERNEL
from jax_fp8.core.recipe import check_recipe
from jax_fp8.core.scale import scale_from_amax
from jax_fp8.grads.loss_trace import LossTrace
from jax_fp8.kernels.quantize import quantize_transpose

TILE = (1, 128)


def power_of_four(amax, dtype):
    """The smallest power of four that is at least the exact scale."""
    exponent = jnp.ceil(jnp.log2(scale_from_amax(amax, dtype)) / 2)
    return jnp.ldexp(jnp.float32(1), 2 * jnp.maximum(exponent, -60).astype(jnp.int32))


def flat_scale(amax, dtype):
    """A mistake: every tensor becomes zeros and saturated numbers."""
    return jnp.full(amax.shape, 2.0**-120)


@dataclass(frozen=True)
class PowerOfFourByTile:
    fp8_format: fp8.Format = HYBRID
    split_accumulator: tuple[str, ...] = ("dgrad", "wgrad")
    formula: Callable = power_of_four
    has_state: bool = False

    def cast(self, tensor, scales, measure):
        return Cast.by_tile(self.fp8_format.dtype_of(tensor), TILE, self.formula)


def batch(step) -> np.ndarray:
    """Rows a b a b ..., every row another pair: who looks at the last token alone cannot know the next one."""
    pairs = np.asarray(jax.random.randint(jax.random.key(step), (8, 2), 0, 16, jnp.int32))
    return np.tile(pairs, (1, 33))[:, :65]


@functools.cache
def start(recipe, **options):
    """A step and first state of a small GPT with every part that a recipe reaches: grouped queries, a gated MLP."""
    config = fp8.GPTConfig(
        vocab_size=128, num_layers=1, num_heads=4, num_kv_heads=2, hidden_size=128, mlp_hidden_size=128, max_seq_len=64,
        norm="rmsnorm", activation="swiglu", positions="rotary", use_bias=False,
    )  # fmt: skip
    model = fp8.GPT(config, recipe=recipe, **options)
    tx = fp8.fused_adamw(3e-3)

    state = fp8.TrainState.create(variables=first_params(config), tx=tx)
    return fp8.make_train_step(fp8.next_token_loss(model), tx, recipe, microbatches=2), state


@functools.cache
def first_params(config):
    """Of models with any recipe that keeps no state."""
    return jax.jit(fp8.GPT(config, recipe=None).init)(jax.random.key(0), batch(0)[:, :-1])


@functools.cache
def train(recipe, steps=32, **options) -> list[float]:
    """The losses."""
    step, state = start(recipe, **options)
    state = jax.tree.map(jnp.copy, state)  # a step takes its buffers
    losses = []
    for i in range(steps):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    return losses


def test_it_is_a_recipe():
    check_recipe(PowerOfFourByTile())
    x = jax.random.normal(jax.random.key(0), (256, 384))
    pair = jax.jit(lambda x: quantize_transpose(x, PowerOfFourByTile().cast(INPUT, None, None)))(x)
    assert pair.rowwise.scale.shape == (256, 3) and pair.columnwise.scale.shape == (384, 2)
    assert (np.log2(np.asarray(pair.rowwise.scale)) % 2 == 0).all()
    assert not pair.shares_scale


def test_it_trains_a_gpt():
    planted, plain = train(PowerOfFourByTile()), train(None)
    assert planted[0] > 4 and max(planted[-5:]) < 1 and max(plain[-5:]) < 1
    # A mistake in the recipe shows: without layers the best guess is one of 16 tokens, a loss of 2.8.
    frozen = train(PowerOfFourByTile(formula=flat_scale))
    assert min(frozen[-5:]) > 2


@pytest.mark.parametrize("tile", [PowerOfFourByTile(), fp8.BlockScaling()], ids=["planted", "block"])
def test_it_serves_recompute_and_the_head(tile):
    kept, recomputed = train(tile, steps=2), train(tile, steps=2, recompute=True)
    assert kept == recomputed
    with_head = train(tile, steps=2, head_recipe=tile)
    assert with_head != kept
    np.testing.assert_allclose(with_head, kept, rtol=0.02)


@pytest.mark.parametrize("recipe", [PowerOfFourByTile(), fp8.CurrentScaling()], ids=["planted", "current"])
def test_its_gemms_are_listed_as_those_of_any_stateless_recipe(recipe):
    layer = fp8.LayerNormMLP(128, "swiglu", recipe=recipe)
    x = np.ones((128, 128), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    assert set(variables) == {"params"}
    assert [*LossTrace.from_function(lambda variables, x: layer.apply(variables, x).sum(), variables, x).gemms] == [
        ("gate+up",),
        ("down",),
    ]


def test_its_weight_is_cast_by_tile():
    layer = fp8.Dense(128, recipe=PowerOfFourByTile())
    x = np.random.default_rng(0).normal(size=(128, 256)).astype(jnp.bfloat16)
    variables = jax.jit(layer.init)(jax.random.key(1), x)
    cast = PowerOfFourByTile().cast(KERNEL, None, None)
    quantized = jax.jit(lambda array: quantize_transpose(array, cast))
    a, b = (quantized(array) for array in (x, variables["params"]["kernel"]))
    expected = jax.jit(lambda a, b: a.rowwise.dequantize() @ b.columnwise.dequantize().T)(a, b)
    found = np.asarray(jax.jit(layer.apply)(variables, x), np.float32)
    np.testing.assert_allclose(found, expected, rtol=0.01, atol=0.01)
