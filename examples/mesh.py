"""A GPT in FP8 on several devices: the training step gets a mesh; the model needs no change.

XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python examples/mesh.py    # eight CPU devices
python examples/mesh.py                                                                          # all GPUs of a host

data     splits the batch
fsdp     splits the batch, params, gradients and optimizer state; kernels are all-gathered in FP8
tensor   splits each layer: heads, hidden features, vocabulary
"""

import jax
import numpy as np

import jax_fp8 as fp8


def make_mesh() -> jax.sharding.Mesh:
    """A mesh of all devices. `tensor` comes last, because its devices communicate most and should be neighbours."""
    count = jax.device_count()
    tensor = 2 if count % 2 == 0 else 1
    fsdp = 2 if count // tensor % 2 == 0 else 1
    return jax.make_mesh((count // tensor // fsdp, fsdp, tensor), ("data", "fsdp", "tensor"))


def main(steps: int = 20, batch: int = 16, length: int = 64, **sizes: int) -> list[float]:
    """Returns the losses of all steps."""
    mesh = make_mesh()
    config = fp8.GPTConfig.preset("tiny", max_seq_len=length, **sizes)
    recipe, tx = fp8.DelayedScaling(), fp8.fused_adamw(1e-3, weight_decay=0.1)
    model = fp8.GPT(config, recipe=recipe)
    loss_fn = fp8.next_token_loss(model)
    step = fp8.make_train_step(loss_fn, tx, recipe, microbatches=2, parallel=mesh)

    # The state is created in shards, so it may be larger than the memory of one device.
    state = step.init_state(model.init, jax.random.key(0), np.zeros((batch, length), np.int32))
    kernel = state.params["layer_0"]["mlp"]["up"]["kernel"]
    print(f"{dict(mesh.shape)}: mlp/up/kernel {kernel.shape} is sharded as {kernel.sharding.spec}")

    # Tokens that can be learned: each row counts up from a random number.
    starts = np.random.default_rng(0).integers(0, config.vocab_size, (steps, batch, 1))
    batches = (starts + np.arange(length + 1)) % config.vocab_size
    losses = []
    for number, tokens in enumerate(batches, 1):
        state, metrics = step(state, tokens)  # a NumPy batch is split over `data` and `fsdp`
        losses.append(float(metrics["loss"]))
        if number % 5 == 0:
            print(f"step {number}: loss {losses[-1]:.3f}")
    # Evaluation is an ordinary jitted function; XLA partitions it by the shardings of the variables.
    print(f"evaluated: {float(jax.jit(loss_fn)(state.variables, batches[0])):.3f}")
    return losses


if __name__ == "__main__":
    main()
