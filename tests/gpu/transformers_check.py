"""Conversion from and to Hugging Face, against `transformers` itself: small random models of each family.

    python tests/gpu/transformers_check.py --output transformers_check.json      # minutes on a CPU

It needs transformers 5 and torch, and neither a GPU nor the kernels; if there is a GPU, our side runs on it.
transformers makes and saves the models. We load them, and compare logits in float32 and 64 generated tokens. Then we
save them, and transformers loads them again: every tensor must have the same bits. Ends with one line per group of
checks, and with exit code 1 if a check failed.
"""

import copy
import functools
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.report import Report, Script, run_script

import jax_fp8 as fp8
from jax_fp8.models.huggingface.config_json import read_config
from jax_fp8.models.huggingface.families import ARCHITECTURES

SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")

# Fields of config classes that do not change what a model computes, and why.
WITHOUT_EFFECT = {
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"), "dropout in training"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), "the ends of a text"),
    "initializer_range": "of params that are not in the file",
    "use_cache": "how transformers generates",
    "pretraining_tp": "another order of the same sums",
    "output_router_logits": "what transformers returns beside logits",
    "router_jitter_noise": "noise in training",
    "reorder_and_upcast_attn": "the precision of float16",
    **dict.fromkeys((f"summary_{kind}" for kind in SUMMARY), "a head for classification"),
}
OF_FAMILY = {
    "glm4_moe": {"num_mtp_layers": "of layers that predict further tokens, which are left out"},
}
IN_FLOAT32 = (".e_score_correction_bias", ".mlp.gate.weight")

VOCAB, SEQ, NEW, PROMPT = 160, 96, 64, 24
CLOSE = 2e-5  # of logits in float32, in their standard deviations; from its float64 transformers is up to 1e-5 away
TYPICAL = 2e-6  # the same, root of the mean square
ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
SCALED = {
    "rope_theta": 500_000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
QWEN3_MOE = {
    "rope_parameters": ROPE, "head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
QWEN2_MOE = {
    "rope_parameters": ROPE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 80,
}  # fmt: skip
GLM = {
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}, "head_dim": 32, "moe_intermediate_size": 32,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "routed_scaling_factor": 1.7,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
FOUR = SIZES | {"num_hidden_layers": 4}
WINDOW = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
TYPES = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}
GEMMA = FOUR | {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 20}
BY_TYPE = {
    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_BY_TYPE = {
    "full_attention": YARN | {"attention_factor": 1.2, "beta_fast": 16.0, "beta_slow": 2.0},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], "rope_theta": 1e4,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0], "partial_rotary_factor": 0.75,
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 6.0, "logits_scaling": 4.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1,
    "rope_parameters": ROPE,
}  # fmt: skip
# The model and its config, in transformers' words.
CASES = {
    "Llama": ("Llama", SIZES | {"rope_parameters": ROPE, "rms_norm_eps": 1e-5}),
    "Llama 3.1": ("Llama", SIZES | {"rope_parameters": SCALED, "rms_norm_eps": 1e-5}),
    "Llama 3.2, tied": ("Llama", SIZES | {"rope_parameters": SCALED, "tie_word_embeddings": True}),
    "Llama, wide heads": ("Llama", SIZES | {"rope_parameters": ROPE, "head_dim": 32}),
    "Llama, biases": ("Llama", SIZES | {"rope_parameters": ROPE, "attention_bias": True, "mlp_bias": True}),
    "Qwen2": ("Qwen2", SIZES | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    "Qwen3": ("Qwen3", SIZES | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "head_dim": 32}),
    "Mixtral": ("Mixtral", SIZES | {"rope_parameters": ROPE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3-MoE": ("Qwen3Moe", SIZES | QWEN3_MOE),
    "Llama, biases of attention": ("Llama", SIZES | {"rope_parameters": ROPE, "attention_bias": True}),
    "Llama, biases of the MLP": ("Llama", SIZES | {"rope_parameters": ROPE, "mlp_bias": True}),
    "Llama, swish": ("Llama", SIZES | {"rope_parameters": ROPE, "hidden_act": "swish"}),
    "Llama, GELU": ("Llama", SIZES | {"rope_parameters": ROPE, "hidden_act": "gelu_pytorch_tanh"}),
    "Llama, linear": ("Llama", SIZES | {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
    "Llama, dynamic": ("Llama", SIZES | {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}}),
    "Llama, yarn": ("Llama", SIZES | {"rope_parameters": YARN}),
    "Llama, yarn of DeepSeek": (
        "Llama",
        SIZES | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "Mistral": ("Mistral", SIZES | {"rope_parameters": ROPE, "sliding_window": None}),
    "Mistral, window": ("Mistral", SIZES | {"rope_parameters": ROPE, "sliding_window": 20, "head_dim": 32}),
    "Mixtral, window": (
        "Mixtral",
        SIZES | {"rope_parameters": ROPE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20},
    ),
    "Qwen2, windows": ("Qwen2", FOUR | {"rope_parameters": ROPE} | WINDOW),
    "Qwen3, windows": ("Qwen3", FOUR | {"rope_parameters": ROPE, "head_dim": 32} | WINDOW | TYPES),
    "Qwen3, biases": ("Qwen3", SIZES | {"rope_parameters": ROPE, "head_dim": 32, "attention_bias": True}),
    "Qwen3-MoE, window, biases": (
        "Qwen3Moe",
        SIZES | QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 20, "attention_bias": True},
    ),
    "Qwen3-MoE, layers of two kinds": (
        "Qwen3Moe",
        FOUR | QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True},
    ),
    "Qwen2-MoE": ("Qwen2Moe", SIZES | QWEN2_MOE),
    "Qwen2-MoE, windows, layers of two kinds": (
        "Qwen2Moe",
        FOUR
        | QWEN2_MOE
        | {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 3, "mlp_only_layers": [0]},
    ),
    "Qwen2-MoE, no biases": ("Qwen2Moe", SIZES | QWEN2_MOE | {"qkv_bias": False, "norm_topk_prob": True}),
    "GLM-4.5": ("Glm4Moe", SIZES | GLM),
    "GLM-4.5, groups": (
        "Glm4Moe",
        FOUR | GLM | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "use_qk_norm": True},
    ),
    "GLM-4.5, biases": (
        "Glm4Moe",
        SIZES | GLM | {"attention_bias": True, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "Gemma 2": ("Gemma2", GEMMA | {"rope_parameters": ROPE}),
    "Gemma 2, low caps": (
        "Gemma2",
        GEMMA | {"rope_parameters": ROPE, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "Gemma 3": ("Gemma3Text", GEMMA | {"rope_parameters": BY_TYPE, "num_hidden_layers": 7}),
    "Gemma 3, untied, types": (
        "Gemma3Text",
        GEMMA | TYPES | {"rope_parameters": BY_TYPE, "tie_word_embeddings": False, "final_logit_softcapping": 3.0},
    ),
    "OLMo 2": ("Olmo2", SIZES | {"rope_parameters": ROPE}),
    "OLMo 2, biases": ("Olmo2", SIZES | {"rope_parameters": ROPE, "attention_bias": True, "num_key_value_heads": 4}),
    "OLMo 3": ("Olmo3", FOUR | {"rope_parameters": YARN_BY_TYPE, "sliding_window": 20, "num_hidden_layers": 5}),
    "Phi-3": ("Phi3", SIZES | {"rope_parameters": ROPE, "sliding_window": 20}),
    "Phi-4, short": ("Phi3", SIZES | {"rope_parameters": LONG, "original_max_position_embeddings": 100}),
    "Phi-4, long": ("Phi3", SIZES | {"rope_parameters": LONG, "original_max_position_embeddings": 16}),
    "SmolLM3": ("SmolLM3", SIZES | {"rope_parameters": ROPE, "num_hidden_layers": 5}),
    "SmolLM3, windows": (
        "SmolLM3",
        FOUR
        | {"use_sliding_window": True, "sliding_window": 20, "rope_parameters": ROPE, "mlp_bias": True}
        | {"no_rope_layers": [1, 0, 0, 1], "tie_word_embeddings": False},
    ),
    "Granite": ("Granite", SIZES | GRANITE),
    "Granite, biases": ("Granite", SIZES | GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "GPT-2": ("GPT2", GPT2),
    "GPT-2, exact GELU": ("GPT2", GPT2 | {"activation_function": "gelu", "n_inner": 96, "layer_norm_epsilon": 1e-3}),
}


@functools.cache
def theirs(case: str):
    """A model of transformers with random params, none of which is zero."""
    torch.manual_seed(0)
    family, settings = copy.deepcopy(CASES[case])  # transformers writes into the objects of a config
    no_ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = getattr(transformers, f"{family}Config")(**settings, **no_ends, attn_implementation="eager")
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family.removesuffix('Text')}{head}")(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            is_scale = ("norm" in name or "ln_" in name) and not family.startswith("Gemma")
            param.copy_(torch.randn_like(param) * 0.15 + (is_scale and name.endswith("weight")))
        for name, buffer in model.named_buffers():
            if name.endswith(IN_FLOAT32[0]):
                buffer.copy_(torch.randn_like(buffer) * 0.15)
    return model.float().eval()


@functools.cache
def saved(case: str, dtype: str = "float32", largest: str = "1GB") -> Path:
    """The folder of the model, as transformers saves it."""
    folder = Path(tempfile.mkdtemp())
    model = theirs(case)
    if dtype != "float32":
        model = type(model)(model.config).to(getattr(torch, dtype))
        model.load_state_dict(theirs(case).state_dict())
    model.save_pretrained(folder, max_shard_size=largest)
    return folder


def tokens(batch: int = 3, seq: int = SEQ) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (batch, seq))


def their_logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens())).logits.float().numpy()


def our_logits(config, params) -> np.ndarray:
    model = fp8.GPT(config, recipe=None, dtype=jnp.float32)
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(model.apply)({"params": params}, tokens().astype(np.int32)))


def distance(got, wanted) -> float:
    """The largest error, in standard deviations of the expected array."""
    return float(np.abs(got - wanted).max() / wanted.std())


def check_logits(report: Report):
    for case in CASES:
        config, params = fp8.load_huggingface(saved(case))
        ours, wanted = our_logits(config, params), their_logits(theirs(case))
        found = report.worst[f"logits, {case}"] = distance(ours, wanted)
        report.expect("logits in float32", found < CLOSE, f"{case}: {found:.1e} standard deviations apart")
        typical = float(np.sqrt(np.mean((ours - wanted) ** 2)) / wanted.std())
        kind = "error of logits, root of the mean square"
        report.worst[kind] = max(report.worst.get(kind, 0.0), typical)
        report.expect("logits in float32", typical < TYPICAL, f"{case}: {typical:.1e} standard deviations apart")


def check_controls(report: Report):
    """Negative controls: a change of each config field without a param, and of each mapping of a tensor, fails."""
    group = "controls: what is wrong is noticed"

    def control(case, what, change):
        config, params = fp8.load_huggingface(saved(case))
        far = distance(our_logits(*change(config, params)), their_logits(theirs(case)))
        report.expect(group, far > 10 * CLOSE, f"{case}: {what} moves logits by {far:.1e}")

    def attention(name, change):
        def changed(config, params):
            layer = params["layer_0"]
            own = layer["attention"] | {name: layer["attention"][name] | change(layer["attention"][name])}
            return config, params | {"layer_0": layer | {"attention": own}}

        return changed

    def interleaved(linear):
        """As weights that turn pairs (2i, 2i + 1) are laid out."""
        by_pair = np.asarray(linear["kernel"]).reshape(64, 4, -1, 2)
        return {"kernel": by_pair.swapaxes(2, 3).reshape(64, -1)}

    def without_scaling(config, fraction):
        return replace(config, rotary_scaling=None, rotary_fraction=fraction)

    control("Llama 3.1", "no scaling", lambda config, params: (replace(config, rotary_scaling=None), params))
    control("Llama 3.1", "another base", lambda config, params: (replace(config, rotary_base=1e4), params))
    control("Llama", "another epsilon", lambda config, params: (replace(config, norm_epsilon=1e-2), params))
    control("Llama", "pairs (2i, 2i + 1)", attention("query", interleaved))
    control("Llama", "a transposed kernel", attention("query", lambda query: {"kernel": query["kernel"].T}))
    control("Qwen2", "no bias", attention("key", lambda key: {"bias": 0 * key["bias"]}))
    control("Qwen3", "no norm", lambda config, params: (replace(config, qk_norm=False), params))
    control("Mixtral", "one expert", lambda config, params: (replace(config, experts_per_token=1), params))
    control("Qwen3-MoE", "weights", lambda config, params: (replace(config, normalize_router_weights=True), params))
    for field, value in (("router_scores", "softmax"), ("router_scale", 1.0), ("rotary_fraction", 1.0)):
        control("GLM-4.5", field, lambda config, params, own={field: value}: (replace(config, **own), params))
    control("GLM-4.5, groups", "groups", lambda config, params: (replace(config, groups_per_token=3), params))
    control("Mistral, window", "no window", lambda config, params: (replace(config, sliding_window=None), params))
    control("Qwen2, windows", "all layers", lambda config, params: (replace(config, windowed_layers=None), params))
    control("Gemma 2", "no cap", lambda config, params: (replace(config, attention_logit_cap=None), params))
    control("Gemma 2", "no cap of the head", lambda config, params: (replace(config, logit_cap=None), params))
    control("Gemma 2", "another scale", lambda config, params: (replace(config, attention_scale=None), params))
    control("Gemma 2", "embeddings", lambda config, params: (replace(config, embedding_multiplier=1.0), params))
    control("Gemma 3", "one base", lambda config, params: (replace(config, window_rotary_base=None), params))
    control("Gemma 3", "no scaling", lambda config, params: (replace(config, rotary_scaling=None), params))
    control("Phi-4, short", "all rotate", lambda config, params: (without_scaling(config, 1.0), params))
    control("Phi-4, short", "no scaling", lambda config, params: (without_scaling(config, 0.75), params))
    control("SmolLM3", "all layers rotate", lambda config, params: (replace(config, unrotated_layers=()), params))
    control("Llama, yarn", "no scaling", lambda config, params: (replace(config, rotary_scaling=None), params))
    for field in ("residual_multiplier", "embedding_multiplier", "logit_divisor"):
        control("Granite", field, lambda config, params, field=field: (replace(config, **{field: 1.0}), params))
    control("GPT-2", "exact GELU", lambda config, params: (replace(config, activation="gelu_exact"), params))


def check_parts(report: Report):
    """A model in several files has the same params as in one."""
    for case in CASES:
        folder = saved(case, largest="60KB")
        count = len(list(folder.glob("*.safetensors")))
        report.expect("several files", count > 1, f"{case}: {count} files")
        one, other = (fp8.load_huggingface(path) for path in (saved(case), folder))
        report.expect("several files", one[0] == other[0], f"{case}: another config")
        for got, wanted in zip(jax.tree.leaves(other[1]), jax.tree.leaves(one[1]), strict=True):
            report.bits("several files", got, wanted, case)


def check_texts(report: Report):
    """Greedy generation: both continue the same prompts with the same tokens."""
    for case in CASES:
        prompt = tokens(seq=PROMPT)
        with torch.no_grad():
            options = {"max_new_tokens": NEW, "do_sample": False, "use_cache": True}
            whole = theirs(case).generate(torch.from_numpy(prompt), **options).numpy()
        config, params = fp8.load_huggingface(saved(case))
        model = fp8.GPT(config, recipe=None, dtype=jnp.float32)
        with jax.default_matmul_precision("highest"):
            written = np.asarray(fp8.generate(model, {"params": params}, prompt, max_new_tokens=NEW))
        wanted = whole[:, PROMPT:]
        same = written.shape == wanted.shape and np.array_equal(written, wanted)
        report.expect(f"{NEW} tokens of 3 prompts", same, f"{case}: {written.tolist()} instead of {wanted.tolist()}")
        report.expect("texts vary", len(np.unique(wanted)) > 4, f"{case}: {np.unique(wanted)}")


def check_back(report: Report):
    """transformers loads what we save: the same tensors and the same model."""
    for case in CASES:
        for dtype in ("float32", "bfloat16"):
            config, params = fp8.load_huggingface(saved(case, dtype))
            on_device = jax.device_put(params)
            for largest in (10**9, 60_000):
                folder = Path(tempfile.mkdtemp())
                own = theirs(case).config.model_type
                fp8.save_huggingface(folder, config, on_device, max_part_bytes=largest, model_type=own)
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, dtype="auto", attn_implementation="eager"
                ).eval()
                wanted = theirs(case).state_dict()
                got = model.state_dict()
                label = f"{case}, {dtype}, {len(list(folder.glob('*.safetensors')))} files"
                report.expect("back", set(got) == set(wanted), f"{label}: other tensors")
                for name, tensor in got.items():
                    expected = wanted[name].to(getattr(torch, dtype))
                    if own == "glm4_moe" and name.endswith(IN_FLOAT32):  # where transformers computes in float32
                        expected = expected.float()
                    same = tensor.dtype == expected.dtype and tensor.equal(expected)
                    report.expect(f"back, {dtype}: every tensor has its bits", same, f"{label}: {name}")
                if dtype == "float32":
                    same = np.array_equal(their_logits(model), their_logits(theirs(case)))
                    report.expect("back: the same logits by transformers", same, label)


class Asked(dict):
    """A config.json that remembers which of its fields were asked for."""

    def __init__(self, described):
        super().__init__(described)
        self.names = set()

    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name):
        self.names.add(name)
        return super().__getitem__(name)

    def __contains__(self, name):
        self.names.add(name)
        return super().__contains__(name)


def check_fields(report: Report):
    """Each field of a config class of transformers is asked for by our reader, or listed as one without effect."""
    for model_type in ARCHITECTURES:
        read: set[str] = set()
        cases = [case for case in CASES if theirs(case).config.model_type == model_type]
        for case in cases:
            described = Asked(json.loads((saved(case) / "config.json").read_text()))
            read_config(described, "here")
            read |= described.names
        without_effect = set(WITHOUT_EFFECT) | set(OF_FAMILY.get(model_type, ()))
        unknown = set(type(theirs(cases[0]).config).__annotations__) - {"model_type"} - read - without_effect
        report.expect("every field is read, or has no effect", not unknown, f"{model_type}: {sorted(unknown)}")
        both = read & without_effect
        report.expect("no field that is read is without effect", not both, f"{model_type}: {sorted(both)}")


def check_missing_fields(report: Report):
    """Where a field is deleted, from_pretrained decides what it means: we compute the same, or refuse it too."""
    for model_type in ARCHITECTURES:
        case = next(case for case in CASES if theirs(case).config.model_type == model_type)
        folder = Path(tempfile.mkdtemp())
        shutil.copytree(saved(case), folder, dirs_exist_ok=True)
        described = json.loads((folder / "config.json").read_text())
        whole, _ = fp8.load_huggingface(folder)
        of_whole = their_logits(theirs(case))
        for name in described:
            (folder / "config.json").write_text(
                json.dumps({other: value for other, value in described.items() if other != name})
            )
            label = f"{case} without {name}"
            try:
                model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
                wanted = their_logits(model)
            except Exception:  # of any kind: the shapes of its tensors do not fit, or its config is not valid
                wanted = None
            try:
                config, params = fp8.load_huggingface(folder)
            except ValueError as error:
                is_size = wanted is None or repr(name) in str(error) or name == "model_type"
                report.expect("refused without a size", is_size, f"{label}: {error}")
                continue
            if wanted is None:
                # Without pad_token_id, transformers refuses vocabularies that do not have its default.
                report.expect("refused, as by transformers", name in WITHOUT_EFFECT, label)
                continue
            found = of_whole if config == whole else our_logits(config, params)
            far = distance(found, wanted)
            report.expect("a field that is missing", far < 2 * CLOSE, f"{label}: {far:.1e} apart")


CHECKS = [check_logits, check_controls, check_parts, check_texts, check_back, check_fields, check_missing_fields]


def main(arguments: list[str] | None = None) -> int:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # its products are small, and XLA needs threads too
    return run_script(Script(__file__, __doc__, CHECKS, anywhere=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
