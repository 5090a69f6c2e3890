"""MaxText's own train loop in FP8, with the real package: `make hosts` runs this on a CPU, in ten minutes.

    python tests/hosts/maxtext_check.py --output maxtext_check.json

Losses of 20 steps of a small Llama by each recipe beside MaxText's bfloat16 and its own FP8; the same with accumulation
of gradients, with layers that are not scanned, with another remat policy, with a head in FP8, over a mesh of four
devices, with a mixture of experts, and after a run was restored from MaxText's own checkpoint. The state after 20 steps
is read: every history must be filled, and every scale be that of its history. Ends with one line per group of checks,
and with exit code 1 if a check failed.
"""

import contextlib
import functools
import io
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from maxtext.trainers.pre_train import train

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.report import Report, Script, run_script

import jax_fp8 as fp8
from jax_fp8.integrations import maxtext

STEPS = 20
RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=32),
    "current": fp8.CurrentScaling(),
    "block": fp8.BlockScaling(),
}
SIZES = {
    "max_target_length": 64, "base_emb_dim": 64, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 16,
    "base_mlp_dim": 128, "base_num_decoder_layers": 2, "vocab_size": 256, "decoder_block": "llama2",
}  # fmt: skip
OPTIONS = {
    "run_name": "check", "dataset_type": "synthetic", "enable_checkpointing": "false", "hardware": "cpu",
    "attention": "dot_product", "skip_jax_distributed_system": "true", "enable_goodput_recording": "false",
    "monitor_goodput": "false", "log_config": "false", "learning_rate": "1e-2", "warmup_steps_fraction": "0.2",
    "learning_rate_schedule_steps": "40",
}  # fmt: skip
EXPERTS = {
    "decoder_block": "mixtral", "num_experts": "4", "num_experts_per_tok": "2", "base_moe_mlp_dim": "128",
    "megablox": "false", "sparse_matmul": "false", "capacity_factor": "2.0",
}  # fmt: skip
ONE_DEVICE = {"per_device_batch_size": "1", "ici_fsdp_parallelism": "1", "ici_data_parallelism": "4"}
LAYERS = [f"self_attention/{name}" for name in ("query", "key", "value", "out")] + [
    f"mlp/{name}" for name in ("wi_0", "wi_1", "wo")
]
# Of a loss, relative to the first one. MaxText draws other params where layers have an FP8 product.
CLOSE = 0.03


def run(quantization: str = "", recipe=None, head=None, steps: int = STEPS, folder: str | None = None, **options):
    """The losses of a run, MaxText's last state, and what is printed."""
    with tempfile.TemporaryDirectory() as own, contextlib.redirect_stdout(io.StringIO()) as printed:
        metrics = Path(own) / "metrics.jsonl"
        if recipe is not None:
            maxtext.use(recipe, head)
            quantization = maxtext.STANDS_FOR
        settings = OPTIONS | SIZES | ONE_DEVICE | {
            "base_output_directory": folder or own, "metrics_file": metrics, "steps": steps,
            "quantization": quantization,
        } | options  # fmt: skip
        config, recorder = train.initialize(["", *(f"{name}={value}" for name, value in settings.items())])
        state = train.train_loop(config, recorder)
        losses = [json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()]
    return losses, state, printed.getvalue()


def states_of(state) -> dict[str, dict[str, np.ndarray]]:
    """The FP8 states in MaxText's state, by the paths of their layers."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        for name in ("amax_history", "scale"):
            if name in names and any(part.startswith("Product") or part == "quant_einsums" for part in names):
                layer = "/".join(names[: names.index(name)])
                found.setdefault(layer, {})[name] = np.asarray(leaf)
    return found


def off(losses, expected) -> float:
    """The largest difference, relative to the first loss."""
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True)) / expected[0]


@functools.cache
def losses_by(name: str | None) -> list[float]:
    """Of a run by one of the recipes, or in bfloat16."""
    return run(recipe=RECIPES[name])[0] if name else run()[0]


def check_state(report: Report, name: str, state, count: int, steps: int = STEPS):
    states = states_of(state)
    report.expect("states", len(states) == count, f"{name}: {len(states)} instead of {count}: {sorted(states)}")
    for layer, leaves in states.items():
        history = leaves["amax_history"].reshape(-1, 3, leaves["amax_history"].shape[-1])
        scale = leaves["scale"].reshape(-1, 3)
        filled = bool((history[:, :, -min(steps, history.shape[-1] - 1) + 4 :] > 0).all())
        report.expect("histories are filled", filled, f"{name}, {layer}: {history[:, :, -4:]}")
        wanted = history.max(-1) / np.array([448, 448, 57344], np.float32)
        report.expect("scales are those of the histories", np.allclose(scale, wanted, rtol=1e-6), f"{name}, {layer}")


def check_recipes(report: Report):
    expected = losses_by(None)
    report.expect("learns", expected[-1] < 0.7 * expected[0] and len(expected) == STEPS, f"{expected}")
    theirs, state, _ = run("fp8")
    report.worst["of a loss, MaxText's own FP8, relative to the first"] = off(theirs, expected)
    report.expect("controls", not states_of(state), "states of ours in MaxText's own FP8")
    for name, recipe in RECIPES.items():
        losses, state, printed = run(recipe=recipe)
        report.worst[f"of a loss, {name}, relative to the first"] = off(losses, expected)
        report.expect("losses of 20 steps", 0 < off(losses, expected) < CLOSE, f"{name}: {losses} not {expected}")
        taken = all(f"decoder/layers/{layer}" in printed for layer in LAYERS)
        report.expect("listed", taken and "token_embedder (Embed without FP8)" in printed, f"{name}: {printed}")
        if recipe.has_state:
            check_state(report, name, state, len(LAYERS))


def check_variants(report: Report):
    recipe = RECIPES["delayed"]
    expected = losses_by("delayed")
    unscanned, state, _ = run(recipe=recipe, scan_layers="false")
    plain, _, _ = run(scan_layers="false")
    report.expect("without scan", off(unscanned, plain) < CLOSE, f"{unscanned} instead of {plain}")
    check_state(report, "without scan", state, 2 * len(LAYERS))
    minimal, _, _ = run(recipe=recipe, remat_policy="minimal")
    report.expect("remat", off(minimal, expected) < 1e-3, f"{minimal} instead of {expected}")
    headed, state, printed = run(recipe=recipe, head=recipe)
    report.expect("head", off(headed, expected) < CLOSE and headed != expected, f"{headed} instead of {expected}")
    report.expect("listed", "decoder/logits_dense" in printed.splitlines()[1], printed)
    check_state(report, "head", state, len(LAYERS) + 1)


def check_accumulation(report: Report):
    plain, _, _ = run(gradient_accumulation_steps=4)
    for name in ("delayed", "current"):
        losses, state, _ = run(recipe=RECIPES[name], gradient_accumulation_steps=4)
        report.expect("accumulation", off(losses, plain) < CLOSE, f"{name}: {losses} instead of {plain}")
        if name == "delayed":
            check_state(report, "accumulation", state, len(LAYERS))


def check_mesh(report: Report):
    mesh = {"ici_fsdp_parallelism": "4", "ici_data_parallelism": "1"}
    for name in ("delayed", "current"):
        alone = losses_by(name)
        losses, state, _ = run(recipe=RECIPES[name], **mesh)
        report.worst[f"of a loss, fsdp=4, {name}, relative to the first"] = off(losses, alone)
        report.expect("mesh", off(losses, alone) < CLOSE, f"{name}: {losses} instead of {alone}")
        if name == "delayed":
            check_state(report, "mesh", state, len(LAYERS))


def check_experts(report: Report):
    plain, _, _ = run(**EXPERTS)
    for name in ("delayed", "current"):
        losses, state, printed = run(recipe=RECIPES[name], **EXPERTS)
        report.worst[f"of a loss, experts, {name}, relative to the first"] = off(losses, plain)
        report.expect("experts", 0 < off(losses, plain) < CLOSE, f"{name}: {losses} instead of {plain}")
        taken = all(f"MoeBlock_0/{layer}" in printed.splitlines()[1] for layer in ("wi_0", "wi_1", "wo"))
        report.expect("listed", taken and "gate (the router" in printed, printed)
        if name == "delayed":
            states = {layer: leaves for layer, leaves in states_of(state).items() if "quant_einsums/w" in layer}
            filled = [bool((leaves["amax_history"][..., -8:] > 0).all()) for leaves in states.values()]
            report.expect("histories are filled", filled == [True] * 3, f"experts: {sorted(states)} {filled}")
    sparse, _, printed = run(recipe=RECIPES["current"], **EXPERTS | {"sparse_matmul": "true"})
    report.expect("listed", "wo (a ragged product of sparse_matmul=true)" in printed, printed)
    report.expect("experts", sparse[-1] < 0.8 * sparse[0], f"{sparse}")


def check_restoring(report: Report):
    options = {"enable_checkpointing": "true", "checkpoint_period": "5", "async_checkpointing": "false"}
    whole, _, _ = run(recipe=RECIPES["delayed"], steps=10)
    with tempfile.TemporaryDirectory() as folder:
        first, _, _ = run(recipe=RECIPES["delayed"], steps=5, folder=folder, **options)
        second, state, _ = run(recipe=RECIPES["delayed"], steps=10, folder=folder, **options)
    report.expect("restored", [*first, *second][-10:] == whole, f"{first} {second} instead of {whole}")
    check_state(report, "restored", state, len(LAYERS), 10)


CHECKS = [check_recipes, check_variants, check_accumulation, check_mesh, check_experts, check_restoring]


def main(arguments: list[str] | None = None) -> int:
    return run_script(Script(__file__, __doc__, CHECKS, anywhere=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
