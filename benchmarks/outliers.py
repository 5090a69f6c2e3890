"""Gradient errors of all other channels when one channel has large values, by recipe: a table, on any machine.

    python benchmarks/outliers.py

A layer of 256 channels gets 256 tokens of normally distributed numbers. Then one channel of its GEMM's input, or of the
gradient that enters its backward pass, is multiplied by a factor. A figure is the error of a kernel's gradient against
float32, in percent: the error of each channel relative to its own size, as root mean square over all but the large
channel, which would hide the others. Delayed scaling has seen the same tensors before, so its scales have settled.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from tables import table

import jax_fp8 as fp8

TOKENS = WIDTH = 256  # two tiles
CHANNEL = 7
E4M3 = fp8.Format(forward=fp8.E4M3, backward=fp8.E4M3)
RECIPES = {
    "`BlockScaling()`": fp8.BlockScaling(),
    '`BlockScaling(wgrad="1d1d")`': fp8.BlockScaling(wgrad="1d1d"),
    "`CurrentScaling()`": fp8.CurrentScaling(),
    "`CurrentScaling()`, all in E4M3": fp8.CurrentScaling(fp8_format=E4M3),
    "`DelayedScaling()`": fp8.DelayedScaling(amax_history_len=2),
    "`recipe=None`": None,
}
LAYERS: dict[str, tuple[Callable[..., nn.Module], str, str]] = {  # and its first and its last kernel
    "Dense": (functools.partial(fp8.Dense, WIDTH), "kernel", "kernel"),
    "LayerNormDense": (functools.partial(fp8.LayerNormDense, WIDTH), "kernel", "kernel"),
    "LayerNormMLP": (functools.partial(fp8.LayerNormMLP, WIDTH), "up", "down"),
}
CASES = {  # of inputs, of gradients
    "none": (1.0, 1.0),
    "inputs, 1,000 times": (1e3, 1.0),
    "inputs, 100,000 times": (1e5, 1.0),
    "gradients, 1,000 times": (1.0, 1e3),
    "gradients, 100,000 times": (1.0, 1e5),
}


@functools.cache
def kernels_of(layer: str, recipe: Any, dtype: Any, case: str) -> dict[str, np.ndarray]:
    """The gradients of a layer's first and last kernel (in, out)."""
    of_inputs, of_gradients = CASES[case]
    _, first, last = LAYERS[layer]
    x, dy = (jax.random.normal(key, (TOKENS, WIDTH)) for key in jax.random.split(jax.random.key(0)))
    variables, step = _program(layer, recipe, dtype)
    params = variables["params"]
    if "norm" in params:  # which would divide by what is large in its input: large channels come from its scale
        norm = params["norm"] | {"scale": params["norm"]["scale"].at[CHANNEL].multiply(of_inputs)}
        variables = variables | {"params": params | {"norm": norm}}
    else:
        x = x.at[:, CHANNEL].multiply(of_inputs)
    dy = dy.at[:, CHANNEL].multiply(of_gradients)
    for _ in range(2):
        _, gradients, staged = step(variables, x, dy)
        if isinstance(recipe, fp8.DelayedScaling):
            variables = variables | {"fp8": fp8.update_state(staged, recipe)}
    _, gradients, _ = step(variables, x, dy)
    return {name: np.asarray(_kernel(gradients, name), np.float64) for name in (first, last)}


@functools.cache
def _program(layer, recipe, dtype):
    module = LAYERS[layer][0](use_bias=False, recipe=recipe, dtype=dtype)
    variables = module.init(jax.random.key(1), jnp.zeros((TOKENS, WIDTH)))
    product = lambda variables, x, dy: jnp.sum(module.apply(variables, x).astype(jnp.float32) * dy)  # noqa: E731
    return variables, jax.jit(fp8.value_and_grad(product))


def _kernel(gradients, name):
    return gradients["kernel"] if name == "kernel" else gradients[name]["kernel"]


def error(layer: str, recipe: Any, case: str) -> float:
    """The error of the other channels: rows of the first kernel if the inputs have the large channel, else columns of
    the last.
    """
    _, first, last = LAYERS[layer]
    of_inputs, _ = CASES[case]
    name, axis = (first, 1) if of_inputs > 1 else (last, 0)
    found, exact = (kernels_of(layer, *how, case)[name] for how in ((recipe, jnp.bfloat16), (None, jnp.float32)))
    of_channels = np.linalg.norm(found - exact, axis=axis) / np.linalg.norm(exact, axis=axis)
    return float(np.sqrt(np.mean(np.delete(of_channels, CHANNEL) ** 2)))


def cells(layer: str, name: str, recipe: Any) -> list[str]:
    return [name, *(f"{100 * error(layer, recipe, case):.1f}" for case in CASES)]


def main() -> int:
    for layer in LAYERS:
        rows = [cells(layer, name, recipe) for name, recipe in RECIPES.items()]
        print(f"`{layer}`\n\n{table(['recipe', *CASES], rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
