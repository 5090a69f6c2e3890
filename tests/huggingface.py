"""Hugging Face models without transformers: folders of small random models, and their forward in NumPy's float64.

Written from the published equations, with the names and layouts of the files of these families: Llama
(https://arxiv.org/abs/2407.21783), Qwen2.5 (https://arxiv.org/abs/2412.15115), Qwen3
(https://arxiv.org/abs/2505.09388), Mixtral (https://arxiv.org/abs/2401.04088), GLM-4.5
(https://arxiv.org/abs/2508.06471) and GPT-2.
tests/gpu/transformers_check.py compares with transformers itself.
"""

import json
import math

import jax.numpy as jnp
import numpy as np
from experts import dense_weights

VOCAB = 96
LLAMA = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_theta": 10_000.0, "rope_scaling": None, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CASES = {
    "llama": LLAMA,
    "llama 3.1": LLAMA | {"rope_theta": 500_000.0, "rope_scaling": SCALING},
    "llama 3.2": LLAMA | {"rope_parameters": {"rope_theta": 500_000.0} | SCALING, "tie_word_embeddings": True},
    "llama with biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "qwen2": LLAMA | {"model_type": "qwen2", "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 64},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 16, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    "mixtral": LLAMA | {
        "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "qwen3 with experts": LLAMA | {
        "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 32, "intermediate_size": 32, "norm_topk_prob": False, "router_aux_loss_coef": 0.001,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "qwen2 with experts": LLAMA | {
        "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64, "norm_topk_prob": False, "router_aux_loss_coef": 0.001,
        "decoder_sparse_step": 1, "mlp_only_layers": [0], "qkv_bias": True,
    },
    "glm": LLAMA | {
        "model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "n_shared_experts": 2, "routed_scaling_factor": 1.7, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "norm_topk_prob": True, "partial_rotary_factor": 0.5, "head_dim": 16, "use_qk_norm": True,
        "attention_bias": True, "num_nextn_predict_layers": 0,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    },
}  # fmt: skip


def shapes_of(described) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors, by name."""
    if described["model_type"] == "gpt2":
        return _shapes_of_gpt2(described)
    width, heads = (described[name] for name in ("hidden_size", "num_attention_heads"))
    head_dim, is_llama = described.get("head_dim", width // heads), described["model_type"] == "llama"
    queries, keys = (described[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    found = {"model.embed_tokens.weight": (VOCAB, width), "model.norm.weight": (width,)}
    if not described["tie_word_embeddings"]:
        found["lm_head.weight"] = (VOCAB, width)
    linear = {
        "self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
    }  # fmt: skip
    with_bias = {name for name in linear if has_qkv_bias(described) and name[-6:] in ("q_proj", "k_proj", "v_proj")}
    for i in range(described["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        own = linear | _shapes_of_mlps(described, i)
        found |= {f"{layer}{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
        found |= {f"{layer}{name}.weight": shape for name, shape in own.items()}
        biased = set(own) if is_llama and described["mlp_bias"] else with_bias
        found |= {f"{layer}{name}.bias": own[name][:1] for name in biased}
        if has_qk_norm(described):
            found |= {f"{layer}self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
        if described["model_type"] == "glm4_moe" and not is_dense(described, i):
            found[f"{layer}mlp.gate.e_score_correction_bias"] = (experts_of(described),)
    return found


def _shapes_of_mlps(described, i) -> dict[str, tuple[int, ...]]:
    width, hidden, linear = described["hidden_size"], described["intermediate_size"], {}
    if not is_dense(described, i):
        hidden = described.get("moe_intermediate_size", hidden)
        linear[f"{described_mlp(described)}.gate"] = (experts_of(described), width)
    if described["model_type"] == "qwen2_moe" and not is_dense(described, i):
        linear["mlp.shared_expert_gate"] = (1, width)
    for mlp in mlps_of(described, i):
        own = shared_of(described) if "shared" in mlp else hidden
        gate, up, down = (f"{mlp}.{name}" for name in names_in_mlp(described))
        linear |= {gate: (own, width), up: (own, width), down: (width, own)}
    return linear


def has_qkv_bias(described) -> bool:
    family = described["model_type"]
    return (
        family == "qwen2" or described.get("qkv_bias", False) or (family == "glm4_moe" and described["attention_bias"])
    )


def has_qk_norm(described) -> bool:
    return described["model_type"].startswith("qwen3") or described.get("use_qk_norm", False)


def is_dense(described, i) -> bool:
    """Whether layer `i` has one MLP for all tokens."""
    first = described.get("first_k_dense_replace", 0)
    return not experts_of(described) or i < first or i in described.get("mlp_only_layers", ())


def shared_of(described) -> int:
    """The width of the shared expert."""
    own = described.get("n_shared_experts", 0) * described.get("moe_intermediate_size", 0)
    return described.get("shared_expert_intermediate_size", own)


def experts_of(described) -> int:
    return described.get("num_experts", described.get("num_local_experts", described.get("n_routed_experts", 0)))


def described_mlp(described) -> str:
    """The name of a layer's MLP, or of all its experts."""
    return "block_sparse_moe" if described["model_type"] == "mixtral" else "mlp"


def mlps_of(described, i) -> list[str]:
    """The names of the MLPs of layer `i`, the shared one last."""
    name = described_mlp(described)
    if is_dense(described, i):
        return [name]
    shared = {"qwen2_moe": ["mlp.shared_expert"], "glm4_moe": ["mlp.shared_experts"]}
    experts = [f"{name}.experts.{number}" for number in range(experts_of(described))]
    return experts + shared.get(described["model_type"], [])


def names_in_mlp(described) -> tuple[str, str, str]:
    """The names of gate, up and down."""
    return ("w1", "w3", "w2") if described["model_type"] == "mixtral" else ("gate_proj", "up_proj", "down_proj")


def _shapes_of_gpt2(described):
    width, hidden = described["n_embd"], described["n_inner"] or 4 * described["n_embd"]
    norms = {name: (width,) for name in ("weight", "bias")}
    found = {"wte.weight": (VOCAB, width), "wpe.weight": (described["n_positions"], width)}
    found |= {f"ln_f.{name}": shape for name, shape in norms.items()}
    linear = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width), "mlp.c_fc": (width, hidden)}
    for i in range(described["n_layer"]):
        found |= {f"h.{i}.{norm}.{name}": shape for norm in ("ln_1", "ln_2") for name, shape in norms.items()}
        for module, shape in (linear | {"mlp.c_proj": (hidden, width)}).items():
            found |= {f"h.{i}.{module}.weight": shape, f"h.{i}.{module}.bias": shape[1:]}
    return {f"transformer.{name}": shape for name, shape in found.items()}


def random_tensors(described, dtype="float32", seed=0) -> dict[str, np.ndarray]:
    """Random tensors, none of which is zero; the scales of norms are about one."""
    random = np.random.default_rng(seed)
    return {
        name: (random.normal(("norm" in name or "ln_" in name) and name.endswith("weight"), 0.2, shape)).astype(
            np.float32 if name.endswith("correction_bias") else jnp.dtype(dtype)
        )
        for name, shape in shapes_of(described).items()
    }


def write_folder(folder, described, tensors, parts=1):
    """Saves a model like transformers, in one file, or in `parts` files with an index."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described))
    if parts == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    where = {name: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(array.nbytes for array in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# ---- what they compute -----------------------------------------------------------------------------------------------


def rotate_half(x):
    """The rotation of pairs (i, i + d / 2), the layout of Hugging Face's files."""
    half = x.shape[-1] // 2
    return np.concatenate([-x[..., half:], x[..., :half]], axis=-1)


def frequencies(described, head_dim):
    rope = (described.get("rope_parameters") or {}) | (described.get("rope_scaling") or {})
    base = rope.get("rope_theta", described.get("rope_theta"))
    found = 1 / base ** (np.arange(0, head_dim, 2) / head_dim)
    if rope.get("rope_type", "default") == "default":
        return found
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    slowed = []
    for frequency in found:
        wavelength = 2 * math.pi / frequency
        smooth = (original / wavelength - low) / (high - low)
        if wavelength < original / high:
            slowed.append(frequency)
        elif wavelength > original / low:
            slowed.append(frequency / rope["factor"])
        else:
            slowed.append((1 - smooth) * frequency / rope["factor"] + smooth * frequency)
    return np.array(slowed)


def attend(query, key, value):
    """Causal attention of (seq, heads, head_dim); keys and values have as many heads or fewer."""
    seq, heads, head_dim = query.shape
    key, value = (np.repeat(part, heads // part.shape[1], axis=1) for part in (key, value))
    scores = np.einsum("qhd,khd->hqk", query, key) / math.sqrt(head_dim)
    scores = np.where(np.tril(np.ones((seq, seq), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, value).reshape(seq, -1)


def rms_norm(x, scale, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def layer_norm(x, scale, bias, epsilon):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * scale + bias


def logits_of(described, tensors, tokens, rotate=rotate_half):
    """The logits (seq, vocab) of tokens (seq,)."""
    tensors = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
    run = _gpt2 if described["model_type"] == "gpt2" else _llama
    return run(described, tensors, np.asarray(tokens), rotate)


def _llama(described, tensors, tokens, rotate):
    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)

    heads, epsilon = described["num_attention_heads"], described["rms_norm_eps"]
    head_dim = described.get("head_dim", described["hidden_size"] // heads)
    rotated = int(head_dim * described.get("partial_rotary_factor", 1))
    angles = np.arange(len(tokens))[:, None] * frequencies(described, rotated)
    angles = np.concatenate([angles, angles], axis=-1)[:, None]  # (seq, 1, head_dim)
    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(described["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        y = rms_norm(x, tensors[f"{layer}input_layernorm.weight"], epsilon)
        query, key, value = (linear(y, f"{layer}self_attn.{name}_proj").reshape(len(x), -1, head_dim) for name in "qkv")
        if has_qk_norm(described):
            query = rms_norm(query, tensors[f"{layer}self_attn.q_norm.weight"], epsilon)
            key = rms_norm(key, tensors[f"{layer}self_attn.k_norm.weight"], epsilon)
        query, key = (
            np.concatenate([own * np.cos(angles) + rotate(own) * np.sin(angles), part[..., rotated:]], axis=-1)
            for part in (query, key) for own in (part[..., :rotated],)
        )  # fmt: skip
        x = x + linear(attend(query, key, value), f"{layer}self_attn.o_proj")
        y = rms_norm(x, tensors[f"{layer}post_attention_layernorm.weight"], epsilon)
        x = x + _mlps(described, tensors, linear, i, y)
    x = rms_norm(x, tensors["model.norm.weight"], epsilon)
    return x @ tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).T


def _mlps(described, tensors, linear, i, y):
    """The MLP, or for each token the sum of its experts, by their weights."""
    gate, up, down = names_in_mlp(described)
    layer = f"model.layers.{i}."

    def mlp(name):
        gated = linear(y, f"{layer}{name}.{gate}")
        return linear(gated / (1 + np.exp(-gated)) * linear(y, f"{layer}{name}.{up}"), f"{layer}{name}.{down}")

    names = mlps_of(described, i)
    if is_dense(described, i):
        return mlp(names[0])
    logits = linear(y, f"{layer}{described_mlp(described)}.gate")
    rule = {"normalize": described.get("norm_topk_prob", True)}
    if described["model_type"] == "glm4_moe":
        rule |= {"scores": "sigmoid", "bias": tensors[f"{layer}mlp.gate.e_score_correction_bias"]}
        rule |= {"scale": described["routed_scaling_factor"], "groups": described["n_group"]}
        rule["groups_per_token"] = described["topk_group"]
    weights = dense_weights(logits, described["num_experts_per_tok"], **rule).T
    if described["model_type"] == "qwen2_moe":
        of_shared = 1 / (1 + np.exp(-linear(y, f"{layer}mlp.shared_expert_gate")))
        weights = np.concatenate([weights, of_shared.T])
    elif described["model_type"] == "glm4_moe":
        weights = np.concatenate([weights, np.ones((1, len(y)))])
    return sum(weight[:, None] * mlp(name) for weight, name in zip(weights, names, strict=True))


def _gpt2(described, tensors, tokens, rotate):
    del rotate

    def linear(x, name):
        return x @ tensors[f"transformer.{name}.weight"] + tensors[f"transformer.{name}.bias"]

    def norm(x, name):
        scale, bias = (tensors[f"transformer.{name}.{leaf}"] for leaf in ("weight", "bias"))
        return layer_norm(x, scale, bias, described["layer_norm_epsilon"])

    table = tensors["transformer.wte.weight"]
    x = table[tokens] + tensors["transformer.wpe.weight"][: len(tokens)]
    for i in range(described["n_layer"]):
        projections = np.split(linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, axis=-1)
        attended = attend(*(part.reshape(len(x), described["n_head"], -1) for part in projections))
        x = x + linear(attended, f"h.{i}.attn.c_proj")
        y = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ table.T
