"""Load a Hugging Face model, generate from it, train it in FP8, and save it in the same format.

    python examples/huggingface.py path/to/Llama-3.2-1B    # a folder with config.json and safetensors files
    python examples/huggingface.py                         # creates a tiny random Llama

Nothing is downloaded. Llama, Qwen2, Qwen3, Mixtral, Qwen3-MoE and GPT-2 models can be loaded.
"""

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp8 as fp8


def make_folder(path: Path) -> Path:
    """A random Llama with two layers, in the format of Hugging Face."""
    config = fp8.GPTConfig.preset("tiny-llama", num_layers=2)
    model = fp8.GPT(config, recipe=None)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]
    fp8.save_huggingface(path, config, params, dtype=jnp.bfloat16)
    return path


def main(folder: Path, target: Path, steps: int = 5, batch: int = 8, length: int = 32) -> list[float]:
    """Returns the losses of all steps."""
    # Arrays on the host, memory-mapped from the files. Without `dtype` they have the files' dtypes.
    config, params = fp8.load_huggingface(folder)
    print(f"{config.num_layers} layers, {config.hidden_size} wide, {config.vocab_size} tokens")

    # Replace these random tokens by those of your tokenizer.
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (batch, length + 1))
    model = fp8.GPT(config, recipe=None)  # in bfloat16, as it was trained
    generated = fp8.generate(model, {"params": jax.device_put(params)}, tokens[:2, :8], max_new_tokens=8)
    print(f"continuations: {np.asarray(generated).tolist()}")

    # Training needs params in float32; the layers compute in FP8. The first step initializes the scales by itself.
    config, params = fp8.load_huggingface(folder, dtype=jnp.float32)
    recipe, tx = fp8.DelayedScaling(), fp8.fused_adamw(1e-4, weight_decay=0.1)
    model = fp8.GPT(config, recipe=recipe)
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, recipe)
    state = step.init_state(
        lambda *inputs: {**model.init(*inputs), "params": params}, jax.random.key(0), tokens[:, :-1]
    )
    losses = []
    for _ in range(steps):
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
    print(f"losses: {', '.join(f'{loss:.3f}' for loss in losses)}")

    fp8.save_huggingface(target, config, state.params, dtype=jnp.bfloat16)
    print(f"{target} has the trained model")
    return losses


if __name__ == "__main__":
    made = Path(tempfile.mkdtemp())
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else make_folder(made / "random"), made / "trained")
