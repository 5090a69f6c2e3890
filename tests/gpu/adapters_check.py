"""Adapters on kernels that are frozen in FP8, on a GPU: the same bits as kernels that are cast in every step.

    python tests/gpu/adapters_check.py --output adapters_check.json      # two minutes on an H200
    python tests/gpu/adapters_check.py --self-test                       # a smaller model, on a CPU

With `CurrentScaling` and `BlockScaling` a kernel is scaled by its own amax, frozen or not. So the loss and the
gradients of adapters must have the same bits. Gradients in FP8 are compared with those in bfloat16, too, and training
must leave frozen weights as they are. Ends with one line per group of checks, and with exit code 1 if a check failed.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.adam_check import poison
from gpu.report import Report, Script, on_gpu, run_script

import jax_fp8 as fp8
from jax_fp8.core.lora import LORA_B
from jax_fp8.core.paths import map_with_names

LORA = fp8.Lora(rank=16, alpha=32)
RECIPES = {"current": fp8.CurrentScaling(), "block": fp8.BlockScaling(), "delayed": fp8.DelayedScaling()}


def sizes() -> tuple[fp8.GPTConfig, np.ndarray]:
    size = {"hidden_size": 1024, "mlp_hidden_size": 2816, "num_heads": 8} if on_gpu() else {"hidden_size": 128}
    config = fp8.GPTConfig.preset("tiny-llama", num_layers=2, vocab_size=1024, max_seq_len=512, **size)
    rows, seq = (4, 512) if on_gpu() else (2, 64)
    return config, np.random.default_rng(0).integers(0, 1024, (rows, seq + 1)).astype(np.int32)


def with_adapters(variables, seed=1):
    """With second matrices that are not zeros."""

    def draw(names, param):
        is_second = names[-1] == LORA_B
        return (0.05 * jax.random.normal(jax.random.key(seed), param.shape)).astype(param.dtype) if is_second else param

    return {**variables, "params": map_with_names(draw, variables["params"])}


def prepared(recipe, remat):
    config, tokens = sizes()
    model = fp8.GPT(config, recipe=recipe, lora=LORA, param_dtype=jnp.bfloat16, remat=remat)
    variables = with_adapters(jax.jit(model.init)(jax.random.key(0), tokens[:, :-1]))
    frozen = fp8.freeze_kernels(variables, recipe, forward=lambda v: model.apply(v, tokens[:, :-1]))
    return model, variables, frozen, tokens


def gradients(model, variables, tokens):
    gradient = jax.jit(fp8.value_and_grad(lambda v: fp8.next_token_loss(model)(v, tokens)))
    loss, grads, _ = gradient(variables)
    flat = jax.tree_util.tree_leaves_with_path(grads)
    return loss, {jax.tree_util.keystr(path): leaf for path, leaf in flat if "lora_" in path[-1].key}


def check_bits(report: Report):
    for name in ("current", "block"):
        for remat in ("none", "norms", "full") if on_gpu() else ("full",):
            model, variables, frozen, tokens = prepared(RECIPES[name], remat)
            loss, wanted = gradients(model, variables, tokens)
            poison(0x5A)
            frozen_loss, found = gradients(model, frozen, tokens)
            report.bits("frozen kernels are kernels", frozen_loss, loss, f"{name} {remat}: the loss")
            for path, gradient in wanted.items():
                report.bits("frozen kernels are kernels", found[path], gradient, f"{name} {remat}: {path}")
                report.expect("gradients are there", bool(jnp.any(gradient)), f"{name} {remat}: {path} is zero")
            _, other = gradients(model, with_adapters(frozen, seed=2), tokens)
            same = all(
                np.array_equal(*map(np.asarray, pair)) for pair in zip(other.values(), found.values(), strict=True)
            )
            report.expect("controls", not same, f"{name} {remat}: other adapters have the same gradients")


def check_against_bfloat16(report: Report):
    for name, recipe in RECIPES.items():
        model, variables, frozen, tokens = prepared(recipe, "full")
        if recipe.has_state:
            first_scales = fp8.warm_start(fp8.next_token_loss(model), recipe)
            frozen = {**frozen, "fp8": jax.jit(first_scales)(frozen, tokens)}
        _, found = gradients(model, frozen, tokens)
        plain = {"params": variables["params"]}
        _, wanted = gradients(model.clone(recipe=None), plain, tokens)
        for path, gradient in wanted.items():
            expected = np.asarray(gradient, np.float32)
            error = np.linalg.norm(np.asarray(found[path], np.float32) - expected) / np.linalg.norm(expected)
            kind = f"of a gradient in FP8, {name}, relative"
            report.worst[kind] = max(report.worst.get(kind, 0.0), float(error))
            report.expect("near bfloat16", error < 0.25, f"{name} {path}: {error:.3f}")


def check_training(report: Report):
    for name, recipe in RECIPES.items():
        for microbatches in (1, 2) if on_gpu() else (1,):
            model, _, frozen, tokens = prepared(recipe, "full")
            tx = fp8.freeze(fp8.fused_adamw(1e-3), trained="lora_")
            step = fp8.make_train_step(fp8.next_token_loss(model), tx, recipe, microbatches)
            state = fp8.TrainState.create(variables=frozen, tx=tx)
            before, losses = jax.tree.map(np.asarray, state), []
            for _ in range(8):
                poison(0xA5)
                state, metrics = step(state, tokens)
                losses.append(float(metrics["loss"]))
            label = f"{name}, {microbatches} microbatches"
            for (path, new), old in zip(
                jax.tree_util.tree_leaves_with_path(state.collections), jax.tree.leaves(before.collections), strict=True
            ):
                report.bits("frozen weights keep their bits", new, old, f"{label}: {jax.tree_util.keystr(path)}")
            kept = jax.tree_util.tree_leaves_with_path(state.params)
            for (path, new), old in zip(kept, jax.tree.leaves(before.params), strict=True):
                if "lora_" not in path[-1].key:
                    report.bits("frozen params keep their bits", new, old, f"{label}: {jax.tree_util.keystr(path)}")
            report.expect("the loss falls", losses[-1] < losses[0] - 0.05, f"{label}: {losses}")


def check_apart(report: Report):
    """Kernels that are kept apart have the bits of kernels side by side, on one device; and on a mesh whose axis
    `tensor` has all devices, the losses of one device.
    """
    for name, recipe in RECIPES.items():
        model, variables, frozen, tokens = prepared(recipe, "full")
        forward = lambda v, model=model, tokens=tokens: model.apply(v, tokens[:, :-1])  # noqa: E731
        apart = fp8.freeze_kernels(variables, recipe, forward=forward, apart=True)
        loss, wanted = gradients(model, frozen, tokens)
        poison(0x5A)
        apart_loss, found = gradients(model, apart, tokens)
        report.bits("kernels that are apart", apart_loss, loss, f"{name}: the loss")
        for path, gradient in wanted.items():
            report.bits("kernels that are apart", found[path], gradient, f"{name}: {path}")

        losses, mesh = {}, jax.make_mesh((jax.device_count(),), ("tensor",))
        tx = fp8.freeze(fp8.fused_adamw(1e-3), trained="lora_")
        for kind, parallel, own in (("one", None, frozen), ("mesh", mesh, apart)):
            step = fp8.make_train_step(fp8.next_token_loss(model), tx, recipe, parallel=parallel)
            state = step.place(fp8.TrainState.create(variables=own, tx=tx), tokens)
            losses[kind] = []
            for _ in range(8):
                poison(0xA5)
                state, metrics = step(state, tokens)
                losses[kind].append(float(metrics["loss"]))
        error = float(np.max(np.abs(np.subtract(losses["mesh"], losses["one"]))))
        kind = f"of a loss over tensor={mesh.size}, {name}, absolute"
        report.worst[kind] = max(report.worst.get(kind, 0.0), error)
        fall = losses["one"][0] - losses["one"][-1]
        report.expect("losses over tensor", error < 0.05 * fall, f"{name}: {losses}")


CHECKS = [check_bits, check_against_bfloat16, check_training, check_apart]


def main(arguments: list[str] | None = None) -> int:
    script = Script(__file__, __doc__, CHECKS, [], target="jax_fp8_transpose", self_test=True)
    return run_script(script, arguments)


if __name__ == "__main__":
    sys.exit(main())
