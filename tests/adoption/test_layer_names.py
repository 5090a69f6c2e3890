"""Names that people give to layers: a GEMM is found by the path of its layer, so a name is taken as it is, in a step
with a weight cache and microbatches too, or refused when the model is made.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_fp8 as fp8
import jax_fp8.nnx

pytestmark = pytest.mark.versions

RECIPE = fp8.DelayedScaling(amax_history_len=2)
X = np.asarray(jax.random.normal(jax.random.key(0), (32, 16)))
KEY = jax.random.key(1)


def ours(name, recipe=RECIPE):
    return fp8.Dense(16, recipe=recipe, name=name)


def flaxs(name, recipe=RECIPE):
    return nn.Dense(16, name=name, dot_general_cls=functools.partial(fp8.DotGeneral, recipe=recipe))


class Model(nn.Module):
    """Layers of these names, in a module of that name."""

    names: tuple[str, ...]
    inside: str | None = None
    make: object = ours
    recipe: fp8.DelayedScaling | None = RECIPE

    @nn.compact
    def __call__(self, x):
        if self.inside is not None:
            return Model(self.names, None, self.make, self.recipe, name=self.inside)(x)
        for name in self.names:
            x = self.make(name, self.recipe)(x)
        return x


def steps(model, cached, microbatches):
    """The losses of two steps."""
    tx, variables = optax.sgd(0.1), model.init(KEY, X)
    cache = {"fp8_cache": fp8.cast_weights(variables, RECIPE)} if cached else {}
    state, losses = fp8.TrainState.create(variables={**variables, **cache}, tx=tx), []

    def loss_fn(variables, x):
        return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32) - x))

    step = fp8.make_train_step(loss_fn, tx, RECIPE, microbatches)
    for _ in range(2):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    return losses


TAKEN = {
    "a slash": Model(("a/b", "a")), "a dot": Model(("a.b",)), "none": Model(("",)), "digits": Model(("0", "00")),
    "arrays": Model(("scale", "kernel", "bias", "recorder")), "a plus around it": Model(("dense",), "a+b"),
    "a tilde inside": Model(("a~b",), "~a"), "collections": Model(("fp8",), "fp8_cache"),
    "as arrays of a cache, inside": Model(("params_version",), "dense"), "Flax's": Model(("a/b", "kernel"), make=flaxs),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_names_that_are_taken(case):
    """A cache changes no bit; neither does another name."""
    model = TAKEN[case]
    losses = steps(model, True, 2)
    assert losses == steps(model, False, 2) and losses[1] < losses[0]


KERNELS, ARRAYS = r'the name of an FP8 layer must not hold "\+"', "a module with FP8 layers must not be called"
REFUSED = {
    "a plus": (Model(("a+b",)), rf"{KERNELS}, .*, got a\+b; give the layer another name"),
    "a plus that would be others": (Model(("a", "b", "a+b")), KERNELS),
    "a plus in front": (Model(("+a",), "inside"), rf'{KERNELS}.* nor begin with "~", got inside/\+a; give'),
    "a tilde": (Model(("~a",)), KERNELS),
    "Flax's": (Model(("a+b",), make=flaxs), KERNELS),
    "Flax's product": (Model(("~product",), make=flaxs), KERNELS),
    "a history": (Model(("scale", "amax_history")), f'{ARRAYS} "amax_history", which is an array .*, got am'),
    "a history around it": (Model(("dense",), "amax_history"), f"{ARRAYS} .* got amax_history/dense; give the module"),
    "Flax's history": (Model(("amax_history",), make=flaxs), ARRAYS),
    "a cache's version": (Model(("params_version",)), f'{ARRAYS} "params_version"'),
    "a cache's recipe": (Model(("dense",), "cast_by"), f'{ARRAYS} "cast_by"'),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_names_that_are_refused_when_variables_are_made(case):
    model, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model.init, KEY, X)
    jax.eval_shape(model.clone(recipe=None).init, KEY, X)  # without FP8 nothing is stored under these names


def test_blocks_may_be_called_like_several_kernels():
    """Their kernels are inside of them."""
    block = fp8.LayerNormMLP(32, activation="swiglu", recipe=RECIPE, name="gate+up")
    assert sorted(jax.eval_shape(block.init, KEY, X)["fp8"]) == ["down", "gate+up"]


def test_names_in_nnx():
    def model(name, recipe=RECIPE):
        return nnx.Dict({name: fp8.nnx.Linear(16, 16, recipe=recipe, rngs=nnx.Rngs(0))})

    for name, message in (("a+b", KERNELS), ("~a", KERNELS), ("amax_history", ARRAYS), ("cast_by", ARRAYS)):
        with pytest.raises(ValueError, match=message):
            fp8.nnx.split(model(name))
        fp8.nnx.split(model(name, None))
    assert sorted(fp8.nnx.split(model("a/b"))[0]["fp8"]) == ["a/b"]
