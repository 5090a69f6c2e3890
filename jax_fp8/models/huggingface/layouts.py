"""Tables from the tensors of Hugging Face models to our params, one table for each family.

Our kernels are (in, features), as in Flax and in GPT-2's Conv1D. PyTorch's Linear is the transpose. Rotary positions
rotate pairs (i, i + head_dim / 2) on both sides, so columns keep their order. Files have one tensor for each expert,
and we have one param for all experts. transformers 5 stacks experts when it loads them, but its files do not.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp8.core.paths import CORRECTION_BIAS, LayerPath, names_of
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.gpt import GPT

# Tensors of a layer: their name without .weight or .bias, and ours. Kernels are transposed, except GPT-2's.
ATTENTION = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
LLAMA_LAYER = {
    "input_layernorm": ("attention/norm",),
    **{f"self_attn.{theirs}": (f"attention/{ours}",) for theirs, ours in ATTENTION.items()},
    "self_attn.q_norm": ("attention/query_norm",),
    "self_attn.k_norm": ("attention/key_norm",),
    "post_attention_layernorm": ("mlp/norm",),
    **{f"mlp.{name}_proj": (f"mlp/{name}",) for name in ("gate", "up", "down")},
}
# The same with experts; {} is the number of the expert. Layers without experts have those of Llama.
WITHOUT_MLP = {theirs: ours for theirs, ours in LLAMA_LAYER.items() if not theirs.startswith("mlp.")}
MIXTRAL_LAYER = WITHOUT_MLP | {
    "block_sparse_moe.gate": ("mlp/router",),
    "block_sparse_moe.experts.{}.w1": ("mlp/gate",),
    "block_sparse_moe.experts.{}.w2": ("mlp/down",),
    "block_sparse_moe.experts.{}.w3": ("mlp/up",),
}
MLP = ("gate", "up", "down")
QWEN3_MOE_LAYER = WITHOUT_MLP | {
    "mlp.gate": ("mlp/router",),
    **{f"mlp.experts.{{}}.{name}_proj": (f"mlp/{name}",) for name in MLP},
}
QWEN2_MOE_LAYER = QWEN3_MOE_LAYER | {
    "mlp.shared_expert_gate": ("mlp/shared/router",),
    **{f"mlp.shared_expert.{name}_proj": (f"mlp/shared/{name}",) for name in MLP},
}
GLM4_MOE_LAYER = QWEN3_MOE_LAYER | {f"mlp.shared_experts.{name}_proj": (f"mlp/shared/{name}",) for name in MLP}
GEMMA_LAYER = LLAMA_LAYER | {
    "post_attention_layernorm": ("attention/post_norm",),
    "pre_feedforward_layernorm": ("mlp/norm",),
    "post_feedforward_layernorm": ("mlp/post_norm",),
}
OLMO_LAYER = {theirs: ours for theirs, ours in LLAMA_LAYER.items() if theirs != "input_layernorm"} | {
    "post_attention_layernorm": ("attention/post_norm",),
    "post_feedforward_layernorm": ("mlp/post_norm",),
}
PHI3_LAYER = {
    "input_layernorm": ("attention/norm",),
    "self_attn.qkv_proj": ("attention/query", "attention/key", "attention/value"),  # one after the other
    "self_attn.o_proj": ("attention/out",),
    "post_attention_layernorm": ("mlp/norm",),
    "mlp.gate_up_proj": ("mlp/gate", "mlp/up"),
    "mlp.down_proj": ("mlp/down",),
}
GPT2_LAYER = {
    "ln_1": ("attention/norm",),
    "attn.c_attn": ("attention/query", "attention/key", "attention/value"),  # side by side
    "attn.c_proj": ("attention/out",),
    "ln_2": ("mlp/norm",),
    "mlp.c_fc": ("mlp/up",),
    "mlp.c_proj": ("mlp/down",),
}
# Tensors outside of the layers.
LLAMA_TOP = {"model.embed_tokens": "embedding", "model.norm": "final_norm", "lm_head": "head"}
GPT2_TOP = {
    "transformer.wte": "embedding",
    "transformer.wpe": "positions",
    "transformer.ln_f": "final_norm",
    "lm_head": "head",
}
# Of each family: the name before the number of a layer, the tensors of a layer, and those outside of the layers.
LLAMA = "model.layers", LLAMA_LAYER, LLAMA_TOP
TABLES = {
    "gpt2": ("transformer.h", GPT2_LAYER, GPT2_TOP),
    "mixtral": ("model.layers", MIXTRAL_LAYER, LLAMA_TOP),
    "qwen3_moe": ("model.layers", QWEN3_MOE_LAYER, LLAMA_TOP),
    "qwen2_moe": ("model.layers", QWEN2_MOE_LAYER, LLAMA_TOP),
    "glm4_moe": ("model.layers", GLM4_MOE_LAYER, LLAMA_TOP),
    **dict.fromkeys(("gemma2", "gemma3_text"), ("model.layers", GEMMA_LAYER, LLAMA_TOP)),
    **dict.fromkeys(("olmo2", "olmo3"), ("model.layers", OLMO_LAYER, LLAMA_TOP)),
    "phi3": ("model.layers", PHI3_LAYER, LLAMA_TOP),
}
LEAVES = {
    "weight": (("kernel",), ("scale",), ()),
    "bias": (("bias",),),
    "e_score_correction_bias": ((CORRECTION_BIAS,),),
}  # leaves of our modules; () is a table


Shapes = dict[LayerPath, tuple[int, ...]]


@dataclass(frozen=True)
class Entry:
    """A tensor of a file, and the params that it holds.

    Args:
      name: in the file.
      paths: of our params. Several params stand side by side in the columns of the tensor.
      shapes: of these params.
      is_transposed: the tensor is the transpose of the param.
      expert: the tensor belongs to the expert with this number, of a param (experts, in, out). None: no experts.
    """

    name: str
    paths: tuple[LayerPath, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_transposed: bool = False
    expert: int | None = None

    @property
    def stays_float32(self) -> bool:
        """Whether no dtype that a caller asks for changes the tensor: small steps add up in it."""
        return self.paths[0][-1] == CORRECTION_BIAS

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        *rows, _ = self.shapes[0] if self.expert is None else self.shapes[0][1:]
        shape = (*rows, sum(shape[-1] for shape in self.shapes))
        return shape[::-1] if self.is_transposed else shape

    def params_of(self, tensor: np.ndarray) -> list[np.ndarray]:
        """The params, or one expert's part of each, as views of the tensor."""
        ends = list(accumulate(shape[-1] for shape in self.shapes))
        whole = tensor.T if self.is_transposed else tensor
        return np.split(whole, ends[:-1], axis=-1) if len(ends) > 1 else [whole]

    def tensor_of(self, params: list[jax.Array]) -> np.ndarray:
        """The tensor of these params; arrays of a device are fetched here."""
        arrays = [np.asarray(param if self.expert is None else param[self.expert]) for param in params]
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
        return whole.T if self.is_transposed else whole


def entries_of(config: GPTConfig, family: str) -> list[Entry]:
    """All tensors of a model in the layout of a family, in the order of its layers."""
    other_shapes, shapes, dense_shapes = _shapes(config)
    (prefix, layer, top), linear_is_transposed = TABLES.get(family, LLAMA), family != "gpt2"
    entries = [entry for name, ours in top.items() for entry in _entries(name, (ours,), other_shapes.get, False)]
    params = len(other_shapes)
    for index in range(config.num_layers):
        own_shapes, own_layer = (dense_shapes, LLAMA_LAYER) if index in config.dense_layers else (shapes, layer)
        params += len(own_shapes)
        for name, ours in own_layer.items():
            paths = tuple(f"layer_{index}/{path}" for path in ours)
            shape_of = lambda path, shapes=own_shapes: shapes.get(path[1:])  # noqa: E731
            own = list(_entries(f"{prefix}.{index}.{name}", paths, shape_of, linear_is_transposed))
            entries += _for_experts(own, config.num_experts) if "{}" in name else own
    mapped = [path for entry in entries for path in entry.paths if not entry.expert]
    assert len(mapped) == len(set(mapped)) == params
    return entries


def _entries(
    name: str,
    modules: tuple[str, ...],
    shape_of: Callable[[LayerPath], tuple[int, ...] | None],
    is_transposed: bool,
) -> Iterator[Entry]:
    """Weight and bias of a module, where the model has them."""
    for leaf, ours in LEAVES.items():
        for last in ours:
            paths = tuple((*module.split("/"), *last) for module in modules)
            shapes = tuple(shape for path in paths if (shape := shape_of(path)))
            if len(shapes) == len(paths):
                yield Entry(f"{name}.{leaf}", paths, shapes, is_transposed and last == ("kernel",))


def _for_experts(entries: Iterable[Entry], experts: int) -> Iterator[Entry]:
    for entry in entries:
        for expert in range(experts):
            yield replace(entry, name=entry.name.format(expert), expert=expert)


def _shapes(config: GPTConfig) -> tuple[Shapes, Shapes, Shapes]:
    """The shapes of the params outside of the layers, of a layer, and of a layer without experts in a model with
    experts. Paths in layers begin inside the layer.
    """
    outside, layer = _shapes_of_one_layer(replace(config, dense_layers=(), dense_hidden_size=None))
    dense = _shapes_of_one_layer(replace(config, dense_layers=(0,)))[1] if config.dense_layers else {}
    return outside, layer, dense


def _shapes_of_one_layer(config: GPTConfig) -> tuple[Shapes, Shapes]:
    """The shapes outside of the layers, and those of the first layer."""
    alike = {"sliding_window": None, "windowed_layers": None, "window_rotary_base": None, "unrotated_layers": ()}
    model = GPT(replace(config, num_layers=1, **alike), recipe=None)
    params = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32))["params"]
    shapes = {names_of(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    outside = {path: shape for path, shape in shapes.items() if path[0] != "layer_0"}
    return outside, {path[1:]: shape for path, shape in shapes.items() if path[0] == "layer_0"}
