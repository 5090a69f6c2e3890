"""Train a GPT in FP8 on a text, with bytes as tokens: a complete training loop to copy and change.

    python examples/train_gpt.py                        # a tiny model on this interpreter's own sources
    python examples/train_gpt.py --data book.txt --preset gpt2-124m --recipe current --batch 16 --length 1024

    text → bytes → windows of length + 1 ─step→ loss, and a new `state` with params, optimizer state and scales

`python -m jax_fp8 train` does the same with checkpoints, logs, a tokenizer and several devices.
"""

import argparse
import time
from pathlib import Path

import jax
import numpy as np
import optax

import jax_fp8 as fp8

# How the scale of each FP8 tensor is computed: from its amax in earlier steps, from its own amax, or for each tile of
# it. None is plain bfloat16 with the same params, as a baseline.
RECIPES = {
    "delayed": fp8.DelayedScaling(),
    "current": fp8.CurrentScaling(),
    "block": fp8.BlockScaling(),
    "bf16": None,
}
VALIDATION = 8  # batches


def read(path: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and the last twentieth, which is held out; both are (tokens,)."""
    files = [Path(path)] if path else sorted(Path(argparse.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)
    cut = len(text) - len(text) // 20
    return text[:cut], text[cut:]


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """A batch (rows, length + 1). The model reads all but the last token of a row, and predicts all but the first."""
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def make_optimizer(steps: int, learning_rate: float) -> optax.GradientTransformation:
    """AdamW in one kernel, which also clips gradients, and skips a step whose gradients are not finite.

    Any other Optax transform can be used, too. This one updates params, moments and FP8 weights in place.
    """
    warmup = max(1, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(learning_rate / warmup, learning_rate, warmup, steps + 1)
    return fp8.fused_adamw(schedule, b2=0.95, weight_decay=0.1, max_grad_norm=1.0, skip_nonfinite=True)


def train(
    data: str | None = None,
    preset: str = "tiny",
    recipe: str = "delayed",
    steps: int = 200,
    batch: int = 8,
    length: int = 128,
    learning_rate: float = 1e-3,
    seed: int = 0,
    **sizes: int,
) -> float:
    """Train, print losses and a sample. Returns the validation loss.

    Args:
      sizes: fields of GPTConfig that replace the preset's, such as `num_layers`.
    """
    text, held_out = read(data)
    config = fp8.GPTConfig.preset(preset, vocab_size=256, max_seq_len=length, **sizes)
    chosen = RECIPES[recipe]
    model = fp8.GPT(config, recipe=chosen)

    # A loss is any function of (variables, batch). This one computes logits in pieces, so that memory never has to hold
    # all of them.
    loss_fn = fp8.next_token_loss(model)
    evaluate = jax.jit(fp8.next_token_loss(model, deterministic=True))
    tx = make_optimizer(steps, learning_rate)

    # The step is one jitted program, which donates its state; on a GPU it is one CUDA graph. It updates the scales, so
    # it needs the recipe of the model's layers. With microbatches=4 it splits a batch and accumulates gradients; with
    # parallel=mesh it runs on several devices (examples/mesh.py).
    step = fp8.make_train_step(loss_fn, tx, chosen)
    state = step.init_state(model.init, jax.random.key(seed), np.zeros((batch, length), np.int32))
    params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    print(f"{preset}, {params:,} params, {recipe}, on {jax.devices()[0].device_kind}")

    even = np.linspace(0, len(held_out) - length - 1, VALIDATION * batch).astype(int)
    validation = [windows(held_out, starts, length) for starts in np.split(even, VALIDATION)]

    def validate(state) -> float:
        # `state.variables` are params and scales, for `model.apply`.
        return float(np.mean([evaluate(state.variables, rows) for rows in validation]))

    generator, began = np.random.default_rng(seed), time.perf_counter()
    print(f"step 0: validation loss {validate(state):.3f}")
    for number in range(1, steps + 1):
        starts = generator.integers(0, len(text) - length, batch)
        state, metrics = step(state, windows(text, starts, length))
        # Metrics are on the device. Reading one waits for the step, so this reads only a few.
        if number % max(1, steps // 10) == 0 or number == 1:
            print(f"step {number}: loss {float(metrics['loss']):.3f}, {time.perf_counter() - began:.1f} s")
    loss = validate(state)
    print(f"step {steps}: validation loss {loss:.3f}")

    prompt = held_out[None, : length // 2].astype(np.int32)
    tokens = fp8.generate(
        model, state.variables, prompt, max_new_tokens=length // 2, temperature=0.8, key=jax.random.key(seed)
    )
    for name, ids in (("prompt", prompt[0]), ("the model", np.asarray(tokens)[0])):
        print(f"--- {name}\n{bytes(ids.tolist()).decode(errors='replace')}")
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT in FP8 on a text, with bytes as tokens.")
    parser.add_argument("--data", help="a text file; by default this interpreter's own sources")
    parser.add_argument("--preset", default="tiny", help="model size, a preset of GPTConfig (default: tiny)")
    parser.add_argument(
        "--recipe", choices=RECIPES, default="delayed", help="how FP8 scales are computed; bf16 has none"
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: 200)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step (default: 8)")
    parser.add_argument("--length", type=int, default=128, help="tokens in a sequence (default: 128)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak learning rate (default: 0.001)")
    parser.add_argument("--seed", type=int, default=0, help="of params and batches (default: 0)")
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
