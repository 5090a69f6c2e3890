"""Models and trainers of Tunix in FP8, with the real package: `make hosts` runs this on a CPU, in ten minutes.

    python tests/hosts/tunix_check.py --output tunix_check.json

Each linear layer of small Llama 3, Qwen3, Gemma and Gemma 3 models must be converted or listed. Losses of 20 steps of
Tunix's own PeftTrainer in FP8 are compared with those in float32, for recipes with and without state, with gradient
accumulation, with remat, with adapters on frozen kernels, over a mesh of four devices, and after a run was restored
from Tunix's own checkpoint. Ends with one line per group of checks, and with exit code 1 if a check failed.
"""

import dataclasses
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix.models.gemma import model as gemma
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.report import Report, Script, run_script

import jax_fp8 as fp8
import jax_fp8.nnx as fp8_nnx
from jax_fp8.integrations.tunix import in_fp8, warm_start
from jax_fp8.nnx.product import _warn_of_qwix
from jax_fp8.nnx.state import FrozenWeight

ROWS, SEQ, VOCAB, STEPS = 8, 64, 160, 20
SIZES = {"num_layers": 2, "embed_dim": 64, "hidden_dim": 96, "num_heads": 4, "head_dim": 32, "num_kv_heads": 2}
LLAMA = llama3.ModelConfig(vocab_size=VOCAB, rope_theta=10_000, norm_eps=1e-5, **SIZES)
QWEN = {"vocab_size": VOCAB, "rope_theta": 10_000, "norm_eps": 1e-6, **SIZES}
GLOBAL = {"attention_types": (gemma.AttentionType.GLOBAL,) * 2, "final_logit_softcap": None}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
EINSUMS = ("q_einsum", "kv_einsum", "attn_vec_einsum")
MLP = ("gate_proj", "up_proj", "down_proj")
# The class, its config, the layers of attention and of the MLP, whether it has a head, and what is left in a layer.
MODELS = {
    "Llama 3": (llama3.Llama3, LLAMA, PROJECTIONS, MLP, True, ()),
    "Qwen3": (qwen3.Qwen3, qwen3.ModelConfig(**QWEN), PROJECTIONS, MLP, True, ()),
    "Qwen3 with experts": (
        qwen3.Qwen3,
        qwen3.ModelConfig(**QWEN, num_experts=4, num_experts_per_tok=2),
        PROJECTIONS,
        (),
        True,
        ("mlp", "mlp/router"),
    ),
    "Gemma": (
        gemma.Gemma,
        gemma.ModelConfig(num_embed=VOCAB, use_post_attn_norm=False, use_post_ffw_norm=False, **GLOBAL, **SIZES),
        EINSUMS,
        MLP,
        False,
        (),
    ),
    "Gemma 3": (
        gemma3.Gemma3, gemma3.ModelConfig(num_embed=VOCAB, sliding_window_size=16, **SIZES), EINSUMS, MLP, False, (),
    ),
}  # fmt: skip
DELAYED = fp8.DelayedScaling(amax_history_len=8)
RECIPES = {"current": fp8.CurrentScaling(), "block": fp8.BlockScaling(), "delayed": DELAYED}
CLOSE = 0.02  # of the last loss, relative


def arithmetic_rows(steps: int = STEPS) -> list[peft_trainer.TrainingInput]:
    """Batches of rows that count by seven, which a model learns to continue."""
    random = np.random.default_rng(0)
    starts = random.integers(0, VOCAB, (steps, ROWS, 1))
    tokens = (starts + 7 * np.arange(SEQ)) % VOCAB
    mask = jnp.ones((ROWS, SEQ), bool)
    return [peft_trainer.TrainingInput(input_tokens=jnp.asarray(rows, jnp.int32), input_mask=mask) for rows in tokens]


def model_inputs(batch: peft_trainer.TrainingInput) -> dict[str, jax.Array]:
    rows, seq = batch.input_tokens.shape
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((seq, seq), bool)), (rows, seq, seq))
    positions = jnp.broadcast_to(jnp.arange(seq), (rows, seq))
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": positions,
        "attention_mask": causal,
    }


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def drawn(cls, config) -> nnx.Module:
    """A model whose kernels are random: Tunix makes those of MLPs as zeros, because it loads them."""
    model = cls(config, rngs=nnx.Rngs(0))
    for number, (_, param) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.Param))):
        if not np.any(param.get_value()) and param.get_value().ndim > 1:
            kernel = jax.random.normal(jax.random.key(number), param.get_value().shape, param.get_value().dtype)
            param.set_value(kernel / np.sqrt(kernel.shape[-2]).astype(kernel.dtype))
    return model


def llama(recipe=None, lora=None, config=LLAMA) -> nnx.Module:
    """A Llama 3 with every layer but the head in FP8, with adapters on frozen kernels."""
    model = drawn(llama3.Llama3, config)
    if recipe is not None:
        adapters = {} if lora is None else {"lora": lora, "rngs": nnx.Rngs(1)}
        fp8_nnx.convert(model, recipe, nnx.Not(nnx.PathContains("lm_head")), **adapters)
    if lora is not None:
        fp8_nnx.freeze_kernels(model)
    return model


def train(model, recipe=None, cls=None, steps=STEPS, warm=True, batches=None, rate=3e-3, **options) -> list[float]:
    """The losses of Tunix's trainer."""
    has_state = recipe is not None and recipe.has_state
    cls = cls or (in_fp8(peft_trainer.PeftTrainer) if has_state else peft_trainer.PeftTrainer)
    config = peft_trainer.TrainingConfig(eval_every_n_steps=10_000, max_steps=steps, **options)
    trainer = cls(model, optax.adamw(rate), config).with_gen_model_input_fn(model_inputs)
    batches = arithmetic_rows() if batches is None else batches
    if has_state and warm:
        warm_start(trainer, batches[0])
    losses, own = [], trainer.create_train_step_fn()

    def recorded(model, optimizer, inputs):
        result = own(model, optimizer, inputs)
        jax.debug.callback(lambda loss: losses.append(float(loss)), result[0])
        return result

    trainer.create_train_step_fn = lambda: recorded
    trainer.train(batches)
    jax.effects_barrier()
    return losses


def check_layers(report: Report):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 32)))
    inputs = model_inputs(peft_trainer.TrainingInput(input_tokens=tokens, input_mask=jnp.ones((2, 32), bool)))
    call = tokens, inputs["positions"], None, inputs["attention_mask"]
    for name, (cls, config, attention, mlp, has_head, others) in MODELS.items():
        model = drawn(cls, config)
        before = np.asarray(model(*call)[0], np.float32)
        paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
        result = fp8_nnx.convert(model, fp8.CurrentScaling())
        layers = [*(f"attn/{layer}" for layer in attention), *(f"mlp/{layer}" for layer in mlp)]
        wanted = {f"layers/{number}/{layer}" for number in (0, 1) for layer in layers} | (
            {"lm_head"} if has_head else set()
        )
        report.expect("every linear layer", set(result.converted) == wanted, f"{name}: {result}")
        left = {"embedder", *(f"layers/{number}/{other}" for number in (0, 1) for other in others)}
        report.expect("the others are listed", set(result.left) == left, f"{name}: {result}")
        found = np.asarray(model(*call)[0], np.float32)
        off = np.linalg.norm(found - before) / np.linalg.norm(before)
        report.expect("logits", 0 < off < 0.15, f"{name}: off by {off:.3f}")
        same = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))] == paths
        report.expect("params keep their paths", same, name)


def check_adapters_of_qwix(report: Report):
    """Before `convert` they stay, on layers that stay as they are. After it there are none, and each layer says so."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (2, 32)))
    inputs = model_inputs(peft_trainer.TrainingInput(input_tokens=tokens, input_mask=jnp.ones((2, 32), bool)))
    call = tokens, inputs["positions"], None, inputs["attention_mask"]
    for name in ("Qwen3", "Llama 3", "Gemma"):
        cls, config, attention, *_ = MODELS[name]
        provider = qwix.LoraProvider(module_path=f".*({attention[0]}|gate_proj|down_proj)", rank=4, alpha=8.0)
        model = qwix.apply_lora_to_model(drawn(cls, config), provider, *call)
        result = fp8_nnx.convert(model, DELAYED)
        adapted = [path for path in result.left if path.endswith((attention[0], "gate_proj", "down_proj"))]
        report.expect("adapters of qwix, then convert", len(adapted) == 6 and len(result.converted) >= 6, f"{result}")
        finite = bool(jnp.all(jnp.isfinite(model(*call)[0])))
        count = len(jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
        report.expect("adapters of qwix, then convert", finite and count == 12, f"{name}: {count} matrices")
        model = drawn(cls, config)
        fp8_nnx.convert(model, DELAYED)
        _warn_of_qwix.cache_clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = qwix.apply_lora_to_model(model, provider, *call)
        warned = any("qwix gives it no adapter" in str(warning.message) for warning in said)
        count = len(jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
        report.expect("convert, then adapters of qwix", count == 0 and warned, f"{name}: {count}")


def check_training(report: Report):
    expected = train(llama())
    report.expect("learns", expected[-1] < 0.6 * expected[0] and len(expected) == STEPS, f"{expected}")
    inputs = model_inputs(arithmetic_rows(1)[0])
    call = inputs["input_tokens"], inputs["positions"], None, inputs["attention_mask"]
    rule = qwix.QtRule(
        module_path=".*(attn|mlp).*", weight_qtype=jnp.float8_e4m3fn, act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
    )  # fmt: skip
    theirs = train(qwix.quantize_model(llama(), qwix.QtProvider([rule]), *call))
    off = max(abs(a / b - 1) for a, b in zip(theirs, expected, strict=True))
    report.worst["of a loss, qwix's own FP8 in Tunix, relative"] = off
    report.expect("controls", 0 < off < 3 * CLOSE, f"qwix's own FP8: {theirs}")
    for name, recipe in RECIPES.items():
        model = llama(recipe)
        losses = train(model, recipe)
        off = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
        report.worst[f"of a loss, {name}, relative"] = off
        report.expect("losses of 20 steps", 0 < off < CLOSE, f"{name}: {losses} instead of {expected}")
        if recipe.has_state:
            histories = [gemm["amax_history"] for gemm in _gemms(fp8_nnx.fp8_state(model))]
            filled = all(bool((history[:, -5:] > 0).all()) for history in histories)
            report.expect("histories are filled", filled and len(histories) == 14, f"{len(histories)} GEMMs")
            alone = llama(recipe)
            train(alone, recipe, peft_trainer.PeftTrainer, 3, warm=False)
            histories = [gemm["amax_history"] for gemm in _gemms(fp8_nnx.fp8_state(alone))]
            report.expect("controls", not any(history.any() for history in histories), "without in_fp8")


def _gemms(state):
    for node in state.values():
        yield from [node] if "scale" in node else _gemms(node)


def check_accumulation_and_remat(report: Report):
    batches = [batch for batch in arithmetic_rows(5) for _ in range(4)]  # four equal microbatches are one batch
    for name in ("current", "delayed"):
        recipe = RECIPES[name]
        once = train(llama(recipe), recipe, batches=batches[::4], steps=5)
        model = llama(recipe)
        four = train(model, recipe, batches=batches, steps=5, gradient_accumulation_steps=4)
        off = max(abs(a / b - 1) for a, b in zip(four[::4], once, strict=True))
        report.expect("accumulation", len(four) == 20 and off < 1e-3, f"{name}: {four[::4]} instead of {once}")
        if recipe.has_state:
            history = next(_gemms(fp8_nnx.fp8_state(model)))["amax_history"][0]
            steps = int((history[1:] > 0).sum())
            report.expect("accumulation", steps in (5, 6), f"{steps} amaxes of 5 steps: {history}")
        remat = dataclasses.replace(LLAMA, remat_config=llama3.RematConfig.BLOCK)
        again = train(llama(recipe, config=remat), recipe, batches=batches[::4], steps=5)
        off = max(abs(a / b - 1) for a, b in zip(again, once, strict=True))
        report.expect("remat", off < 1e-3, f"{name}: {again} instead of {once}")


def check_adapters(report: Report):
    for name, recipe in RECIPES.items():
        model = llama(recipe, fp8.Lora(rank=8))
        frozen = bits(nnx.state(model, FrozenWeight))
        others = bits(nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))))
        adapters = bits(nnx.state(model, nnx.LoRAParam))
        losses = train(model, recipe, rate=3e-2)
        report.expect("adapters learn", losses[-1] < losses[0] - 0.1, f"{name}: {losses}")
        report.expect("frozen bits", bits(nnx.state(model, FrozenWeight)) == frozen and len(frozen) >= 14, name)
        same = bits(nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))) == others
        report.expect("frozen bits", same, f"{name}: params")
        moved = [a != b for a, b in zip(bits(nnx.state(model, nnx.LoRAParam)), adapters, strict=True)]
        report.expect("controls", all(moved), f"{name}: adapters that did not move")


def check_mesh(report: Report):
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    for name in ("current", "delayed"):
        recipe = RECIPES[name]
        alone = train(llama(recipe), recipe, steps=5)
        model = llama(recipe)
        with mesh:
            specs = nnx.get_partition_spec(nnx.state(model, nnx.Param))
            placed = jax.tree.map(
                lambda leaf, spec: jax.device_put(leaf, jax.NamedSharding(mesh, spec)),
                nnx.to_pure_dict(nnx.state(model, nnx.Param)),
                nnx.to_pure_dict(specs),
            )
            nnx.update(model, placed)
            report.expect("split", len(model.layers[0].attn.q_proj.w.get_value().sharding.device_set) == 4, name)
            losses = train(model, recipe, steps=5)
        off = max(abs(a / b - 1) for a, b in zip(losses, alone, strict=True))
        report.worst[f"of a loss over a mesh, {name}, relative"] = off
        report.expect("mesh", off < CLOSE, f"{name}: {losses} instead of {alone}")


def check_restoring(report: Report):
    for name in ("current", "delayed"):
        recipe = RECIPES[name]
        whole = train(llama(recipe), recipe, steps=8)
        with tempfile.TemporaryDirectory() as folder:
            options = {"checkpoint_root_directory": folder}
            first = train(llama(recipe), recipe, steps=4, **options)
            model = llama(recipe)
            second = train(model, recipe, steps=8, warm=False, **options)
        report.expect("restored", first + second == whole, f"{name}: {first} {second} instead of {whole}")


CHECKS = [
    check_layers,
    check_adapters_of_qwix,
    check_training,
    check_accumulation_and_remat,
    check_adapters,
    check_mesh,
    check_restoring,
]


def main(arguments: list[str] | None = None) -> int:
    return run_script(Script(__file__, __doc__, CHECKS, anywhere=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
