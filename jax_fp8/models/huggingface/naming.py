"""Tensors of a file under the names of a whole model, and whether its head is tied: files differ in both."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from jax_fp8.models.config import GPTConfig

OF_GPT2 = "transformer."  # the prefix of tensor names, which files of GPT-2 without a head lack
EMBEDDINGS = {"rotary": "model.embed_tokens.weight", "learned": f"{OF_GPT2}wte.weight"}  # by positions
LAYERS = "model.layers."
MOST_DIGITS = 10  # of the number of a layer; a stranger's file may have thousands, which int() refuses
# Buffers that some files have and no model needs: frequencies of rotary positions, masks of GPT-2.
BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def named_as_whole_models(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with the names of a model with a head, without buffers."""
    named = {name: array for name, array in tensors.items() if not name.endswith(BUFFERS)}
    if "wte.weight" in named:
        named = {name if name.startswith("lm_head.") else OF_GPT2 + name: array for name, array in named.items()}
    return named


def without_predictions(
    tensors: Mapping[str, np.ndarray], described: Mapping[str, object], layers: int
) -> dict[str, np.ndarray]:
    """The tensors without those of layers behind the last one, which predict further tokens. A file of GLM has them."""
    beyond = described.get("num_nextn_predict_layers", 1) if described["model_type"] == "glm4_moe" else 0
    ends = layers + (beyond if isinstance(beyond, int) else 0)

    def is_prediction(name: str) -> bool:
        number = name.removeprefix(LAYERS).split(".")[0] if name.startswith(LAYERS) else ""
        return number.isdecimal() and len(number) < MOST_DIGITS and layers <= int(number) < ends

    return {name: tensor for name, tensor in tensors.items() if not is_prediction(name)}


def tied(config: GPTConfig, tensors: dict[str, np.ndarray]) -> tuple[GPTConfig, dict[str, np.ndarray]]:
    """Config and tensors that agree whether the head is tied, as in transformers. Where a file has the head alone, it
    is the embedding too; where it has both and they differ, they are not tied.
    """
    head, table = "lm_head.weight", EMBEDDINGS[config.positions]
    if not config.tie_embeddings or head not in tensors:
        return config, tensors
    others = {name: tensor for name, tensor in tensors.items() if name != head}
    if table not in tensors:
        return config, others | {table: tensors[head]}
    if np.array_equal(tensors[head], tensors[table]):
        return config, others
    return replace(config, tie_embeddings=False), tensors
