"""Families of models on a GPU: windows, scales, caps and norms in bfloat16 and in FP8, against float32.

    python tests/gpu/families_check.py --output families_check.json      # six minutes on an H200
    python tests/gpu/families_check.py --self-test                       # smaller models, on a CPU

Each model of tests/huggingface_families.py gets wider layers, so that cuDNN's attention and FP8 GEMMs take it. The loss
and the gradients of all params in bfloat16, with the attention that the library chooses, must be near those of XLA's
attention in float32; in FP8 they may be farther away. A model without its window, with another scale or without its cap
must be far from it. Text that is generated from a cache must have the most likely token of the whole forward at each
place. Ends with one line per group of checks, and with exit code 1 if a check failed.
"""

import dataclasses
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import huggingface_families as families
from gpu.report import Report, Script, on_gpu, run_script

import jax_fp8 as fp8
from jax_fp8.models.huggingface.config_json import read_config

CLOSE = 0.05  # of all gradients together in bfloat16, relative
CLOSE_IN_FP8 = 16  # times the error in bfloat16, which has 4 more bits of mantissa
WRONG = 2.0  # times as far as the model itself a control must be
NEW = 24
WIDE_HEADS = ("gemma2", "gemma3")  # published with heads of 256 features
# A field that each model is checked without.
WITHOUT = {
    "sliding_window": None,
    "attention_scale": None,
    "attention_logit_cap": None,
    "logit_cap": None,
    "unrotated_layers": (),
    "rotary_scaling": None,
    "residual_multiplier": 1.0,
    "logit_divisor": 1.0,
}


def config_of(case: str) -> fp8.GPTConfig:
    """The family's config with the sizes of a small model on a GPU, and with caps that random logits feel."""
    config = read_config(families.CASES[case], case)
    caps = ("attention_logit_cap", "logit_cap")
    config = dataclasses.replace(config, **{name: 0.3 for name in caps if getattr(config, name) is not None})
    if not on_gpu():
        return config
    head_dim = 256 if case in WIDE_HEADS else 128
    two = {"num_layers": 2, "unrotated_layers": tuple(n for n in config.unrotated_layers if n < 2)}
    if config.windowed_layers is not None:
        two["windowed_layers"] = tuple(n for n in config.windowed_layers if n < 2)
    if config.attention_scale is not None:
        two["attention_scale"] = config.attention_scale * (config.features_of_head / head_dim) ** 0.5
    sizes = {"hidden_size": 512, "mlp_hidden_size": 1024, "num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim}
    window = {} if config.sliding_window is None else {"sliding_window": 72}
    scaling = config.rotary_scaling
    if isinstance(scaling, fp8.LongRopeScaling):  # a factor for each pair of features that rotate
        pairs = int(head_dim * config.rotary_fraction) // 2
        grown = {
            name: tuple(float(x) for x in np.linspace(factor[0], factor[-1], pairs))
            for name in ("short_factors", "long_factors")
            for factor in [getattr(scaling, name)]
        }
        scaling = dataclasses.replace(scaling, **grown)
    return dataclasses.replace(config, max_seq_len=512, rotary_scaling=scaling, **sizes, **two, **window)


def tokens_of(config: fp8.GPTConfig) -> np.ndarray:
    rows, seq = (2, 256) if on_gpu() else (1, 32)
    return np.random.default_rng(0).integers(0, config.vocab_size, (rows, seq + 1)).astype(np.int32)


def model_of(config: fp8.GPTConfig, recipe=None, dtype=jnp.bfloat16, **options) -> fp8.GPT:
    return fp8.GPT(config, recipe=recipe, head_recipe=None, dtype=dtype, **options)


def in_float32(config: fp8.GPTConfig) -> fp8.GPT:
    return model_of(config, dtype=jnp.float32, attention_implementation="xla")


def random_params(config: fp8.GPTConfig, tokens: np.ndarray):
    """Params of which scales and biases are random, too, and in which attention is far from uniform."""
    params = jax.jit(in_float32(config).init)(jax.random.key(0), tokens[:, :-1])["params"]
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    drawn = []
    for number, (path, leaf) in enumerate(leaves):
        noise = jax.random.normal(jax.random.key(number), leaf.shape)
        drawn.append(leaf * 3 if is_attended(path) else leaf + 0.1 * noise if leaf.ndim == 1 else leaf)
    return jax.tree.unflatten(structure, drawn)


def is_attended(path: tuple) -> bool:
    """Whether this is the kernel of queries or keys."""
    return path[-1].key == "kernel" and path[-2].key in ("query", "key")


def gradients(model: fp8.GPT, variables, tokens) -> tuple[float, np.ndarray, np.ndarray]:
    """The loss, all gradients, and those of queries and keys, which are small and see all of attention."""
    gradient = jax.jit(fp8.value_and_grad(lambda own: fp8.next_token_loss(model)(own, tokens)))
    loss, grads, _ = gradient(variables)
    flat = [(path, np.asarray(leaf, np.float32).ravel()) for path, leaf in jax.tree_util.tree_leaves_with_path(grads)]
    attended = [leaf for path, leaf in flat if is_attended(path)]
    return float(loss), np.concatenate([leaf for _, leaf in flat]), np.concatenate(attended)


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def without(config: fp8.GPTConfig, name: str) -> fp8.GPTConfig:
    windows = {"windowed_layers": None, "window_rotary_base": None} if name == "sliding_window" else {}
    return dataclasses.replace(config, **{name: WITHOUT[name]}, **windows)


def check_training(report: Report):
    for case in families.CASES:
        config = config_of(case)
        tokens = tokens_of(config)
        params = random_params(config, tokens)
        with jax.default_matmul_precision("highest"):
            loss, wanted, wanted_attended = gradients(in_float32(config), {"params": params}, tokens)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that caps are computed by XLA
            found_loss, found, attended = gradients(model_of(config), {"params": params}, tokens)
            _, in_fp8, _ = gradients(model_of(config, fp8.CurrentScaling()), {"params": params}, tokens)
            errors = {
                "of all gradients in bfloat16": (off(found, wanted), CLOSE),
                "of queries' and keys' gradients in bfloat16": (off(attended, wanted_attended), 2 * CLOSE),
                "of all gradients in FP8": (off(in_fp8, wanted), CLOSE_IN_FP8 * off(found, wanted)),
            }
            print(case, *(f"{error:.1e} {kind}" for kind, (error, _) in errors.items()), sep=", ", flush=True)
            for kind, (error, limit) in errors.items():
                report.worst[kind] = max(report.worst.get(kind, 0.0), error)
                report.expect("near float32", error <= limit, f"{case}: {error:.1e} {kind}")
            report.expect("near float32", abs(found_loss - loss) < 0.02 * loss, f"{case}: {found_loss}, not {loss}")
            for name, value in WITHOUT.items():
                if getattr(config, name) == value:
                    continue
                _, _, other = gradients(model_of(without(config, name)), {"params": params}, tokens)
                farther = off(other, wanted_attended) / off(attended, wanted_attended)
                report.expect("controls", farther > WRONG, f"{case} without {name} is {farther:.2f} times as far")


def check_generation(report: Report):
    for case in families.CASES:
        config = config_of(case)
        tokens = tokens_of(config)[:, :-1]
        model, variables = in_float32(config), {"params": random_params(config, tokens)}
        length = 3 * tokens.shape[1] // 4
        with jax.default_matmul_precision("highest"):
            texts = fp8.generate(model, variables, tokens[:, :length], max_new_tokens=NEW)
            whole = np.concatenate([tokens[:, :length], np.asarray(texts)], axis=1)
            logits = np.asarray(jax.jit(model.apply)(variables, whole[:, :-1]), np.float32)[:, length - 1 :]
        chosen = np.take_along_axis(logits, whole[:, length:, None], -1)[..., 0]
        behind = float((logits.max(-1) - chosen).max() / logits.std())
        report.expect("generated tokens are the likeliest", behind < 1e-3, f"{case}: behind by {behind:.1e} deviations")


CHECKS = [check_training, check_generation]


def main(arguments: list[str] | None = None) -> int:
    script = Script(__file__, __doc__, CHECKS, [], self_test=True)
    return run_script(script, arguments)


if __name__ == "__main__":
    sys.exit(main())
