"""Adapters in the layout of PEFT, against `peft` itself: small random models, whose adapters are random too.

    python tests/gpu/peft_check.py --output peft_check.json      # a minute on a CPU

It needs peft, transformers 5 and torch, and neither a GPU nor the kernels. PEFT makes and saves the adapters. We load
them, and compare logits in float32. We save them, and PEFT loads them again; then both merge them into the base. Ends
with one line per group of checks, and with exit code 1 if a check failed.
"""

import functools
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peft
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.report import Report, Script, run_script

import jax_fp8 as fp8

CLOSE = 5e-5  # of logits in float32, in their standard deviations
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS = {
    "Llama": transformers.LlamaConfig(**SIZES),
    "Qwen3": transformers.Qwen3Config(**SIZES, head_dim=16),
    "Gemma 2": transformers.Gemma2Config(**SIZES, head_dim=16, query_pre_attn_scalar=16),
    "Phi-3": transformers.Phi3Config(**SIZES),
    "GPT-2": transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64),
}
TARGETS = {  # by model, besides all linear layers
    "Llama": ["q_proj", "v_proj"],
    "Qwen3": ["self_attn.o_proj", "down_proj"],
    "Gemma 2": r".*mlp\.(gate|up)_proj",
    "Phi-3": ["qkv_proj", "down_proj"],
    "GPT-2": ["attn.c_proj", "c_fc"],
}
OPTIONS = {"alpha": {"lora_alpha": 6}, "rslora": {"lora_alpha": 6, "use_rslora": True}}
CASES = [(model, wanted, options) for model in MODELS for wanted in ("all", "some") for options in OPTIONS]
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 20))


@functools.cache
def base_of(model: str) -> Path:
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    transformers.AutoModelForCausalLM.from_config(MODELS[model]).float().save_pretrained(folder)
    return folder


def their_base(model: str) -> torch.nn.Module:
    folder = base_of(model)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()


@functools.cache
def theirs(model: str, wanted: str, options: str) -> tuple[torch.nn.Module, Path]:
    """A model of PEFT, and the folder where it has saved its adapters."""
    lora = peft.LoraConfig(
        r=4,
        target_modules="all-linear" if wanted == "all" else TARGETS[model],
        task_type="CAUSAL_LM",
        fan_in_fan_out=model == "GPT-2",
        **OPTIONS[options],
    )
    adapted = peft.get_peft_model(their_base(model), lora).eval()
    torch.manual_seed(1)
    for name, param in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(param, std=0.1)
    folder = Path(tempfile.mkdtemp())
    adapted.save_pretrained(folder)
    return adapted, folder


def their_logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def our_logits(config: fp8.GPTConfig, params: dict, lora: fp8.Lora | None) -> np.ndarray:
    model = fp8.GPT(config, recipe=None, dtype=jnp.float32, lora=lora)
    return np.asarray(jax.jit(model.apply)({"params": params}, TOKENS))


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / wanted.std())


def check_in(report: Report):
    """Loaded adapters compute what PEFT computes. Without them, or with another alpha, the logits are far."""
    for case in CASES:
        adapted, folder = theirs(*case)
        wanted = their_logits(adapted)
        config, base = fp8.load_huggingface(base_of(case[0]))
        lora, params = fp8.load_adapters(folder, config, base)
        far = distance(our_logits(config, params, lora), wanted)
        report.expect("loaded adapters", far < CLOSE, f"{case}: {far:.1e} apart")
        controls = our_logits(config, base, None), our_logits(config, params, fp8.Lora(rank=4, targets=lora.targets))
        report.expect("controls", all(distance(control, wanted) > 20 * CLOSE for control in controls), str(case))


def check_out(report: Report):
    """Saved adapters are PEFT's again: the same tensors, or where a matrix has several layers, the same logits."""
    for case in CASES:
        adapted, folder = theirs(*case)
        config, base = fp8.load_huggingface(base_of(case[0]))
        lora, params = fp8.load_adapters(folder, config, base)
        saved = Path(tempfile.mkdtemp()) / "saved"
        fp8.save_adapters(saved, config, params, lora, base=str(base_of(case[0])))
        again = peft.PeftModel.from_pretrained(their_base(case[0]), saved).eval()
        far = distance(their_logits(again), their_logits(adapted))
        report.expect("saved adapters", far < CLOSE, f"{case}: {far:.1e} apart")
        again_lora, again_params = fp8.load_adapters(saved, config)
        same = again_lora == lora and all(
            np.array_equal(found, wanted)
            for found, wanted in zip(
                jax.tree.leaves(again_params), jax.tree.leaves(fp8.load_adapters(folder, config)[1]), strict=True
            )
        )
        report.expect("ours again: every number has its bits", same, str(case))


def check_merged(report: Report):
    """Merged by both, in float32."""
    for case in CASES:
        adapted, folder = theirs(*case)
        wanted = their_logits(adapted)
        config, base = fp8.load_huggingface(base_of(case[0]))
        lora, params = fp8.load_adapters(folder, config, base)
        merged = fp8.merge_adapters({"params": params}, lora, base)
        far = distance(our_logits(config, merged, None), wanted)
        report.expect("merged", far < CLOSE, f"{case}: {far:.1e} apart")


def check_refused(report: Report):
    """What our layers do not compute is refused by its name."""
    for field, options in {
        "use_dora": {"use_dora": True},
        "modules_to_save": {"modules_to_save": ["lm_head"]},
        "bias": {"bias": "all"},
        "rank": {"rank_pattern": {"v_proj": 2}},
        "layers": {"layers_to_transform": [0]},
    }.items():
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
        folder = Path(tempfile.mkdtemp())
        peft.get_peft_model(their_base("Llama"), lora).save_pretrained(folder)
        try:
            fp8.load_adapters(folder, fp8.load_huggingface(base_of("Llama"))[0])
        except ValueError as error:
            report.expect("refused", field in str(error), f"{field}: {error}")
        else:
            report.expect("refused", False, f"{field} was loaded")


CHECKS = [check_in, check_out, check_merged, check_refused]


def main(arguments: list[str] | None = None) -> int:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    return run_script(Script(__file__, __doc__, CHECKS, anywhere=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
