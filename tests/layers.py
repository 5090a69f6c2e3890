"""Small modules that use a layer as users do: shared, rematerialised or scanned."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import jax_fp8 as fp8

RECIPE = fp8.DelayedScaling(amax_history_len=4)
FEATURES = 16


def dense(**settings):
    return fp8.Dense(FEATURES, recipe=RECIPE, **settings)


class Chain(nn.Module):
    """Two uses of one layer (`shared`), or of two, with `nn.remat` or without."""

    shared: bool = False
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        cls = nn.remat(fp8.Dense) if self.remat else fp8.Dense
        first = cls(FEATURES, recipe=RECIPE, name="first")
        second = first if self.shared else cls(FEATURES, recipe=RECIPE, name="second")
        return second(nn.tanh(first(x)))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(dense(name="dense")(x)), None


class Scanned(nn.Module):
    """Layers stacked by `nn.scan`, or the same ones unrolled with the stacked variables' slices
    under layer_0, layer_1...
    """

    layers: int = 3
    remat: bool = False
    unrolled: bool = False

    @nn.compact
    def __call__(self, x):
        if self.unrolled:
            for i in range(self.layers):
                x, _ = Layer(name=f"layer_{i}")(x, None)
            return x
        body = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        scan = nn.scan(body, variable_axes={"params": 0, "fp8": 0}, split_rngs={"params": True}, length=self.layers)
        return scan(name="layers")(x, None)[0]


def unstack(tree, layers):
    """{"layers": stacked} as {"layer_0": ..., "layer_1": ...}."""
    leaves, structure = jax.tree.flatten(tree["layers"])
    return {f"layer_{i}": structure.unflatten([leaf[i] for leaf in leaves]) for i in range(layers)}


def weighted_sum(module):
    """A loss with order-one, known output gradients: the sum of the outputs times fixed weights."""

    def loss(variables, x, weights):
        y = module.apply(variables, x)
        return jnp.sum(y.astype(jnp.float32) * weights)

    return loss


def inputs(seed=0, rows=16):
    keys = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(keys[0], (rows, FEATURES), jnp.bfloat16)
    return x, jax.random.normal(keys[1], (rows, FEATURES), jnp.float32).astype(jnp.bfloat16).astype(jnp.float32)
