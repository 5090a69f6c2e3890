"""What the backward keeps by name: what leaves for the host, what stays, and that all of it comes back as it was."""

from collections import Counter
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.core.checkpoint_names import RESIDUAL_NAMES, offload_policy
from jax_fp8.jaxprs.equations import all_equations
from jax_fp8.ops import norm_mlp

WIDTH, MLP = 64, 128
X = np.random.default_rng(0).normal(size=(2, 32, WIDTH)).astype(jnp.bfloat16)
ROWS = 2 * 32
RECIPES = [fp8.DelayedScaling(amax_history_len=2), fp8.CurrentScaling()]
# What leaves a layer with 4 heads: dtype and shape.
HEADS = ("bfloat16", (2, 32, 4, WIDTH // 4))
OF_NAME = {
    "norm_input": {("bfloat16", (ROWS, WIDTH)): 2},
    "gemm_input": {("float8_e4m3fn", (WIDTH, ROWS)): 3},
    "attention_operands": {HEADS: 2},  # XLA's attention keeps its queries in a form of its own
    "mlp_hidden": {("bfloat16", (ROWS, MLP)): 1},
}


class Stack(nn.Module):
    """Two layers, which may be a scan over one, under a policy or without."""

    names: tuple[str, ...] | None
    recipe: fp8.DelayedScaling | fp8.CurrentScaling | None = RECIPES[0]
    scanned: bool = False
    recompute: bool = False

    @nn.compact
    def __call__(self, x):
        cls, of = fp8.TransformerBlock, {"recipe": self.recipe, "recompute": self.recompute}
        if self.names is not None:
            cls = nn.remat(cls, policy=offload_policy(self.names), prevent_cse=not self.scanned)
        if not self.scanned:
            for number in range(2):
                x = cls(4, MLP, **of, name=f"layer_{number}")(x)
            return x
        axes: dict = {"params": 0, "fp8": 0, "fp8_cache": 0}
        layers = nn.scan(
            lambda layer, x, _: (layer(x), None), variable_axes=axes, split_rngs={"params": True}, length=2
        )
        return layers(cls(4, MLP, **of, name="layers"), x, None)[0]


@cache
def variables_of(model):
    return jax.jit(model.init)(jax.random.key(1), X)


def gradient_of(model):
    def loss(variables, x):
        return jnp.mean(jnp.sin(model.apply(variables, x).astype(jnp.float32)))

    return jax.jit(fp8.value_and_grad(loss))


def moved(program) -> tuple[Counter, Counter]:
    """What goes to the host and what comes back: how many arrays of each dtype and shape."""
    out, back = Counter(), Counter()
    for equation, _ in all_equations(program.jaxpr.jaxpr):
        if equation.primitive.name == "device_put":
            array = equation.outvars[0].aval
            to_host = array.memory_space == jax.memory.Space.Host
            (out if to_host else back)[str(array.dtype), array.shape] += 1
    return out, back


@pytest.mark.versions
@pytest.mark.parametrize("names", [RESIDUAL_NAMES, *((name,) for name in RESIDUAL_NAMES), ()], ids=",".join)
def test_what_has_a_name_leaves_and_comes_back(names):
    """And nothing else: no scale, no statistics, no weight, no result of attention."""
    model = Stack(names)
    variables = variables_of(Stack(None))
    out, back = moved(gradient_of(model).trace(variables, X))
    expected = Counter()
    for name in names:
        expected += Counter({array: 2 * count for array, count in OF_NAME[name].items()})
    assert out == back == expected


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(RECIPES[0], id="DelayedScaling", marks=pytest.mark.versions), *RECIPES[1:]],
    ids=lambda recipe: type(recipe).__name__,
)
@pytest.mark.parametrize("options", [{}, {"scanned": True}, {"recompute": True}], ids=str)
def test_bits_are_the_same(recipe, options):
    """Of the loss, all gradients and the FP8 state."""
    here, there = (Stack(names, recipe, **options) for names in (None, RESIDUAL_NAMES))
    variables = variables_of(here)
    traced = gradient_of(there).trace(variables, X)
    assert sum(moved(traced)[0].values()) > 0
    expected, actual = gradient_of(here)(variables, X), traced.lower().compile()(variables, X)
    jax.tree.map(assert_same_bits, actual, expected)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected[1]))


def test_what_comes_back_changed_is_noticed(monkeypatch):
    """Negative control: one array of one name, by the last bit of its dtype."""
    here, there = Stack(None), Stack(RESIDUAL_NAMES)
    variables = variables_of(here)
    expected = gradient_of(here)(variables, X)

    def name_residual(name, x, kept=norm_mlp.name_residual):
        return kept(name, x * 1.01 if name == "mlp_hidden" else x)

    monkeypatch.setattr(norm_mlp, "name_residual", name_residual)
    actual = gradient_of(there)(variables, X)
    with pytest.raises(AssertionError):
        jax.tree.map(assert_same_bits, actual[1], expected[1])


@pytest.mark.parametrize("names", [("scales",), ("norm_input", "weights"), "norm_input"])
def test_names_that_nobody_gives_are_refused(names):
    with pytest.raises(
        ValueError, match="names must be some of norm_input, gemm_input, attention_operands, mlp_hidden"
    ):
        offload_policy(names)
