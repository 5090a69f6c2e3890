"""More families of Hugging Face models without transformers: small random models, and their forward in NumPy's float64.

Written from the published equations: Mistral (https://arxiv.org/abs/2310.06825), Gemma 2
(https://arxiv.org/abs/2408.00118), Gemma 3 (https://arxiv.org/abs/2503.19786), OLMo 2
(https://arxiv.org/abs/2501.00656), Phi-3 (https://arxiv.org/abs/2404.14219), YaRN (https://arxiv.org/abs/2309.00071),
layers without positions (https://arxiv.org/abs/2501.18795). tests/huggingface.py has the first families;
tests/gpu/transformers_check.py compares with transformers itself.
"""

import math

import huggingface as oracle
import numpy as np

VOCAB, LAYERS, FULL, SLIDING = oracle.VOCAB, 4, "full_attention", "sliding_attention"
BASE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_theta": 10_000.0, "tie_word_embeddings": False,
}  # fmt: skip
MIXED = [FULL, SLIDING, SLIDING, FULL]
GEMMA = BASE | {
    "hidden_activation": "gelu_pytorch_tanh", "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 10,
    "tie_word_embeddings": True, "attention_bias": False, "final_logit_softcapping": 5.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0, "beta_slow": 1.0,
    "attention_factor": 1.2,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 8.0],
}  # fmt: skip
PHI = BASE | {
    "model_type": "phi3", "partial_rotary_factor": 0.75, "sliding_window": None, "rope_scaling": LONG,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES = {
    "llama, biases of attention": BASE | {"model_type": "llama", "attention_bias": True, "mlp_bias": False},
    "llama, linear": BASE | {
        "model_type": "llama", "attention_bias": False, "mlp_bias": False, "hidden_act": "gelu_pytorch_tanh",
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "llama, yarn": BASE | {"model_type": "llama", "attention_bias": False, "mlp_bias": True, "rope_scaling": YARN},
    "mistral": BASE | {"model_type": "mistral", "sliding_window": 10},
    "qwen2, windows": BASE | {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 10, "layer_types": MIXED,
    },
    "gemma2": GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "layer_types": [SLIDING, FULL] * 2},
    "gemma3": GEMMA | {
        "model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4, "layer_types": MIXED,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "olmo2": BASE | {"model_type": "olmo2", "attention_bias": False},
    "olmo3": {name: value for name, value in BASE.items() if name != "rope_theta"} | {
        "model_type": "olmo3", "attention_bias": False, "sliding_window": 10, "layer_types": MIXED,
        "rope_parameters": {
            FULL: YARN | {"rope_theta": 5e5}, SLIDING: {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "phi3": PHI,
    "phi3, long": PHI | {"original_max_position_embeddings": 16, "sliding_window": 10},
    "smollm3": BASE | {
        "model_type": "smollm3", "attention_bias": False, "mlp_bias": False, "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": False, "tie_word_embeddings": True,
    },
    "granite": BASE | {
        "model_type": "granite", "attention_bias": False, "mlp_bias": False, "embedding_multiplier": 6.0,
        "residual_multiplier": 0.3, "attention_multiplier": 0.1, "logits_scaling": 4.0,
    },
}  # fmt: skip


def head_dim_of(described) -> int:
    return described.get("head_dim", described["hidden_size"] // described["num_attention_heads"])


def shapes_of(described) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors, by name."""
    family, width, hidden = (described[name] for name in ("model_type", "hidden_size", "intermediate_size"))
    head_dim = head_dim_of(described)
    queries, keys = (described[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    found = {"model.embed_tokens.weight": (VOCAB, width), "model.norm.weight": (width,)}
    found |= {} if described["tie_word_embeddings"] else {"lm_head.weight": (VOCAB, width)}
    attention = {"q_proj": (queries, width), "k_proj": (keys, width), "v_proj": (keys, width)}
    mlp = {"gate_proj": (hidden, width), "up_proj": (hidden, width)}
    if family == "phi3":
        attention, mlp = {"qkv_proj": (queries + 2 * keys, width)}, {"gate_up_proj": (2 * hidden, width)}
    attention, mlp = attention | {"o_proj": (width, queries)}, mlp | {"down_proj": (width, hidden)}
    linear = {f"self_attn.{name}": shape for name, shape in attention.items()}
    biased = set(linear) if described.get("attention_bias") else set()
    biased |= {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"} if family == "qwen2" else set()
    linear |= {f"mlp.{name}": shape for name, shape in mlp.items()}
    biased |= {name for name in linear if name.startswith("mlp.") and described.get("mlp_bias")}
    norms = {name: (width,) for name in norms_of(family)}
    if family == "gemma3_text":
        norms |= {f"self_attn.{name}_norm": (head_dim,) for name in "qk"}
    if family.startswith("olmo"):
        norms |= {"self_attn.q_norm": (queries,), "self_attn.k_norm": (keys,)}
    for i in range(LAYERS):
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in (linear | norms).items()}
        found |= {f"model.layers.{i}.{name}.bias": linear[name][:1] for name in biased}
    return found


def norms_of(family) -> tuple[str | None, ...]:
    """Before and after attention, before and after the MLP."""
    after = ("post_attention_layernorm", "post_feedforward_layernorm")
    if family.startswith("gemma"):
        return "input_layernorm", after[0], "pre_feedforward_layernorm", after[1]
    return after if family.startswith("olmo") else ("input_layernorm", after[0])


def random_tensors(described, dtype="float32", deviation=0.2) -> dict[str, np.ndarray]:
    """Random tensors. Scales of norms are about one; those of Gemma, which are stored minus one, about two, but for
    queries and keys. Its embeddings, which it multiplies, are small: so that texts vary.
    """
    random, is_gemma = np.random.default_rng(0), described["model_type"].startswith("gemma")

    def mean(name):
        return "norm" in name and not (is_gemma and "self_attn" in name)

    return {
        name: random.normal(mean(name), 0.03 if is_gemma and "embed" in name else deviation, shape).astype(dtype)
        for name, shape in shapes_of(described).items()
    }


# ---- what they compute -----------------------------------------------------------------------------------------------


def rotated(x, described, i, length):
    """Queries or keys (seq, heads, head_dim) at positions 0, 1, ... of layer `i`, in a sequence of `length` tokens."""
    if not described.get("no_rope_layers", [1] * LAYERS)[i]:
        return x
    features = int(x.shape[-1] * described.get("partial_rotary_factor", 1.0))
    frequencies, amplitude = frequencies_of(described, features, i, length)
    angles = np.arange(len(x))[:, None, None] * np.concatenate([frequencies, frequencies])
    first, others = x[..., :features], x[..., features:]
    turned = (first * np.cos(angles) + oracle.rotate_half(first) * np.sin(angles)) * amplitude
    return np.concatenate([turned, others], axis=-1)


def frequencies_of(described, features, i, length):
    is_sliding = described.get("layer_types", [FULL] * LAYERS)[i] == SLIDING
    rope = described.get("rope_parameters", {}).get(SLIDING if is_sliding else FULL) or described.get("rope_scaling")
    rope, base = rope or {}, (rope or {}).get("rope_theta", described.get("rope_theta"))
    if is_sliding and described["model_type"] == "gemma3_text":
        rope, base = {}, described["rope_local_base_freq"]
    plain, kind = base ** (-np.arange(0, features, 2) / features), rope.get("rope_type")
    if kind == "linear":
        return plain / rope["factor"], 1
    if kind == "longrope":
        original = described["original_max_position_embeddings"]
        factor = described["max_position_embeddings"] / original
        divisors = rope["long_factor" if length > original else "short_factor"]
        return plain / np.array(divisors), math.sqrt(1 + math.log(factor) / math.log(original))
    if kind == "yarn":
        turns = [
            rope["original_max_position_embeddings"] / (2 * math.pi * rope[f"beta_{end}"]) for end in ("fast", "slow")
        ]
        first, last = (features * math.log(turn) / (2 * math.log(base)) for turn in turns)
        first, last = max(math.floor(first), 0), min(math.ceil(last), features - 1)
        ramp = np.clip((np.arange(features // 2) - first) / (last - first), 0, 1)
        return plain * (1 - ramp) + plain / rope["factor"] * ramp, rope["attention_factor"]
    return plain, 1


def capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def attend(query, key, value, described, i):
    seq, heads, head_dim = query.shape
    key, value = (np.repeat(part, heads // part.shape[1], axis=1) for part in (key, value))
    scale = described.get("attention_multiplier", described.get("query_pre_attn_scalar", head_dim) ** -0.5)
    logits = np.einsum("qhd,khd->hqk", query, key) * scale
    logits = capped(logits, described.get("attn_logit_softcapping"))
    distance = np.arange(seq)[:, None] - np.arange(seq)
    sees = distance >= 0
    if described.get("layer_types", [SLIDING] * LAYERS)[i] == SLIDING and described.get("sliding_window"):
        sees &= distance < described["sliding_window"]
    logits = np.where(sees, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value).reshape(seq, -1)


def logits_of(described, tensors, tokens):
    """The logits (seq, vocab) of tokens (seq,)."""
    tensors = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
    family, head_dim = described["model_type"], head_dim_of(described)
    is_gemma = family.startswith("gemma")

    def norm(x, name):
        return oracle.rms_norm(x, tensors[f"{name}.weight"] + is_gemma, described["rms_norm_eps"])

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)

    def attention(x, i):
        layer = f"model.layers.{i}.self_attn"
        if family == "phi3":
            ends = np.cumsum([described[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value")])
            query, key, value = np.split(linear(x, f"{layer}.qkv_proj"), ends, axis=-1)
        else:
            query, key, value = (linear(x, f"{layer}.{name}_proj") for name in "qkv")
        if family.startswith("olmo"):
            query, key = norm(query, f"{layer}.q_norm"), norm(key, f"{layer}.k_norm")
        query, key, value = (part.reshape(len(x), -1, head_dim) for part in (query, key, value))
        if family == "gemma3_text":
            query, key = norm(query, f"{layer}.q_norm"), norm(key, f"{layer}.k_norm")
        query, key = (rotated(part, described, i, len(x)) for part in (query, key))
        return linear(attend(query, key, value, described, i), f"{layer}.o_proj")

    def mlp(x, i):
        layer = f"model.layers.{i}.mlp"
        if family == "phi3":
            gate, up = np.split(linear(x, f"{layer}.gate_up_proj"), 2, axis=-1)
        else:
            gate, up = linear(x, f"{layer}.gate_proj"), linear(x, f"{layer}.up_proj")
        if "gelu" in described.get("hidden_activation", described["hidden_act"]):
            gate = gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2
        else:
            gate = gate / (1 + np.exp(-gate))
        return linear(gate * up, f"{layer}.down_proj")

    names, multiplier = norms_of(family), described.get("residual_multiplier", 1)
    x = tensors["model.embed_tokens.weight"][tokens] * (described["hidden_size"] ** 0.5 if is_gemma else 1)
    x = x * described.get("embedding_multiplier", 1)
    for i in range(LAYERS):
        for number, branch in enumerate((attention, mlp)):
            own = names[2 * number : 2 * number + 2] if is_gemma else (names[number],)
            before = None if family.startswith("olmo") else own[0]
            after = own[-1] if family.startswith("olmo") or is_gemma else None
            y = x if before is None else norm(x, f"model.layers.{i}.{before}")
            y = branch(y, i)
            x = x + multiplier * (y if after is None else norm(y, f"model.layers.{i}.{after}"))
    x = norm(x, "model.norm") @ tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).T
    return capped(x / described.get("logits_scaling", 1), described.get("final_logit_softcapping"))
