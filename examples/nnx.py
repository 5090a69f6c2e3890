"""FP8 in a Flax NNX model: convert its layers in place, take gradients by `fp8_nnx.value_and_grad`, update scales.

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
    """A function of 32 numbers, as one would write it without FP8."""

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
    loss, grads = fp8_nnx.value_and_grad(loss_fn)(model, batch)  # as nnx.value_and_grad, and stages the amaxes
    optimizer.update(model, grads)
    fp8_nnx.update_state(model)  # the scales of the next step, once for the whole model
    return loss


def main(steps: int = 100, batch: int = 64) -> list[float]:
    """Returns the losses of all steps."""
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    # Swaps each nnx.Linear in place, keeps its params, and says what it left: `out` has one column, no multiple of 16.
    print(fp8_nnx.convert(model, fp8.DelayedScaling()))

    generator = np.random.default_rng(0)
    direction = generator.standard_normal(32)

    def draw():
        x = generator.standard_normal((batch, 32))
        return {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(np.sin(x @ direction / 8), jnp.float32)}

    # Delayed scaling knows amaxes of earlier steps. Before the first one, a pass finds them.
    fp8_nnx.warm_start(loss_fn)(model, draw())
    losses = []
    for number in range(1, steps + 1):
        losses.append(float(step(model, optimizer, draw())))
        if number % 20 == 0:
            print(f"step {number}: loss {losses[-1]:.4f}")
    # Scales are variables of a type of their own, which a checkpoint of `nnx.state(model)` has, too.
    print(f"scales of input, kernel and output gradient: {model.hidden.fp8.scale[...]}")
    return losses


if __name__ == "__main__":
    main()
