"""FP8 in your own Flax Linen model with dropout: layers of jax_fp8 and of Flax in one training step.

python examples/linen.py

x, labels ─loss_fn(variables, batch, rngs)→ loss ─make_train_step→ state with params and scales
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jax_fp8 as fp8

RECIPE = fp8.DelayedScaling()


class Classifier(nn.Module):
    """Residual MLPs. `LayerNormMLP` normalizes and casts in one kernel; a separate norm needs another kernel."""

    width: int = 128
    classes: int = 10

    @nn.compact
    def __call__(self, x, train: bool):
        x = fp8.Dense(self.width, recipe=RECIPE)(x)  # a drop-in for nn.Dense
        for _ in range(2):
            x = x + fp8.LayerNormMLP(4 * self.width, recipe=RECIPE)(x)
            x = nn.Dropout(0.1, deterministic=not train)(x)
        # FP8 GEMMs want multiples of 16 columns. A small head stays in bfloat16: Flax's own layer, or recipe=None.
        return nn.Dense(self.classes)(x)


def make_data(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Points around ten centers, with the index of its center as the label of each point."""
    generator = np.random.default_rng(seed)
    centers = np.random.default_rng(0).standard_normal((10, 64))
    labels = generator.integers(0, 10, count)
    return {"x": (centers[labels] + 3 * generator.standard_normal((count, 64))).astype(np.float32), "labels": labels}


def main(steps: int = 60, batch: int = 128) -> float:
    """Returns the accuracy on held-out points."""
    model, data, held_out = Classifier(), make_data(4096), make_data(1024, seed=1)

    def loss_fn(variables, batch, rngs):
        """`rngs` are keys that the step makes for every step, microbatch and part of the batch."""
        logits = model.apply(variables, batch["x"], train=True, rngs=rngs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    tx = fp8.fused_adamw(1e-3, weight_decay=0.1)
    step = fp8.make_train_step(loss_fn, tx, RECIPE, rngs={"dropout": jax.random.key(0)})
    # variables are {"params": ..., "fp8": ...}: scales are a collection of state, like batch statistics.
    variables = jax.jit(lambda key, x: model.init(key, x, train=False))(jax.random.key(1), data["x"][:batch])
    state = fp8.TrainState.create(variables=variables, tx=tx)

    # Which GEMMs are in FP8, and why the others are not.
    print(fp8.explain(lambda variables, x: model.apply(variables, x, train=False), variables, data["x"][:batch]))

    generator = np.random.default_rng(2)
    for number in range(1, steps + 1):
        rows = generator.integers(0, len(data["x"]), batch)
        state, metrics = step(state, jax.tree.map(lambda array, rows=rows: array[rows], data))
        if number % 20 == 0:
            print(f"step {number}: loss {float(metrics['loss']):.3f}")

    logits = jax.jit(lambda variables, x: model.apply(variables, x, train=False))(state.variables, held_out["x"])
    accuracy = float(np.mean(np.argmax(logits, -1) == held_out["labels"]))
    print(f"accuracy on held-out points: {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
