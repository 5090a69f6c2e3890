"""FP8 in a Flax NNX model: convert its layers in place, use `fp8_nnx.value_and_grad`, and update the scales.

    python examples/nnx.py

Your model, your Optax optimizer and your own jitted step stay as they are.
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jax_fp8 as fp8
import jax_fp8.nnx as fp8_nnx


class Network(nnx.Module):
    """An MLP of 32 inputs and one output, written without any FP8."""

    def __init__(self, rngs: nnx.Rngs, width: int = 128):
        self.up = nnx.Linear(32, width, dtype=jnp.bfloat16, rngs=rngs)
        self.hidden = nnx.Linear(width, width, dtype=jnp.bfloat16, rngs=rngs)
        self.out = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.gelu(self.hidden(nnx.gelu(self.up(x)))))


def loss_fn(model, batch):
    return jnp.mean(jnp.square(model(batch["x"])[:, 0] - batch["y"]))


@nnx.jit
def step(model, optimizer, batch):
    loss, grads = fp8_nnx.value_and_grad(loss_fn)(model, batch)  # like nnx.value_and_grad, and also records the amaxes
    optimizer.update(model, grads)
    fp8_nnx.update_state(model)  # computes the scales of the next step from the amaxes, of all layers in one call
    return loss


def main(steps: int = 100, batch: int = 64) -> list[float]:
    """Returns the losses of all steps."""
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    # Replaces each nnx.Linear in place and keeps its params. The printed result lists the layers that it left:
    # `out` has one column, which is not a multiple of 16.
    print(fp8_nnx.convert(model, fp8.DelayedScaling()))

    generator = np.random.default_rng(0)
    direction = generator.standard_normal(32)

    def draw():
        x = generator.standard_normal((batch, 32))
        return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(np.sin(x @ direction / 8), jnp.float32)}

    # Delayed scaling computes scales from the amaxes of earlier steps. Before the first step, this pass records some.
    fp8_nnx.warm_start(loss_fn)(model, draw())
    losses = []
    for number in range(1, steps + 1):
        losses.append(float(step(model, optimizer, draw())))
        if number % 20 == 0:
            print(f"step {number}: loss {losses[-1]:.4f}")
    # Scales are variables of their own type, and part of a checkpoint of `nnx.state(model)`.
    print(f"scales of input, kernel and output gradient: {model.hidden.fp8.scale[...]}")
    return losses


if __name__ == "__main__":
    main()
