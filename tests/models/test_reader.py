"""A reader's logits are those of the whole model, and padding leaves no trace in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.core.paths import map_with_names
from jax_fp8.models.reader import Reader

pytestmark = pytest.mark.versions

CONFIG = fp8.GPTConfig(vocab_size=64, num_layers=1, num_heads=2, hidden_size=32, max_seq_len=16)
LENGTHS, SLOTS = np.int32([4, 9]), 16
TOKENS = np.random.default_rng(0).integers(0, 64, (2, SLOTS), np.int32)
CURRENT = fp8.CurrentScaling()


@jax.jit
def read(variables, tokens, lengths):
    reader = Reader.for_prompts(MODEL, variables, lengths, SLOTS)
    return reader.read(tokens, reader.empty_caches(0), None)[0]


MODEL = fp8.GPT(CONFIG, recipe=CURRENT, dtype=jnp.float32)
SHAPES = jax.eval_shape(MODEL.init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
RANDOM = np.random.default_rng(1)
VARIABLES = map_with_names(lambda names, leaf: np.float32(RANDOM.normal(names[-1] == "scale", 0.2, leaf.shape)), SHAPES)


OUTLIER = 63  # a token whose embedding has one large number, and so has what norms make of it
VARIABLES["params"]["embedding"][OUTLIER] = 100 * np.eye(32)[0]


def test_padding_changes_no_scale():
    """A prompt alone, as long as it is, by the model itself: its scales are those of its own tokens."""
    length = LENGTHS[1]
    tokens = TOKENS[1:, :length]
    expected = np.asarray(jax.jit(MODEL.apply)(VARIABLES, tokens))[:, -1]

    def deviation(padding):
        padded = np.concatenate([tokens, np.full((1, SLOTS - length), padding, np.int32)], axis=1)
        return np.abs(read(VARIABLES, padded, LENGTHS[1:]) - expected).max() / np.abs(expected).max()

    assert deviation(tokens[0, 0]) < 1e-5  # as `generate` pads
    assert OUTLIER not in tokens and deviation(OUTLIER) > 1e-3  # negative control


def test_what_is_cast_once():
    """Kernels in FP8, and biases side by side in `dtype`; without FP8 the kernels, too."""
    for recipe, leaves in ((CURRENT, {"bias"}), (None, {"kernel", "bias"})):
        model = fp8.GPT(CONFIG, recipe=recipe)
        reader = jax.eval_shape(lambda model=model: Reader.for_prompts(model, VARIABLES, LENGTHS, SLOTS).weights.joined)
        assert {gemm[1:] for gemm in reader} == {
            ("attention", "query+key+value"), ("attention", "out"), ("mlp", "up"), ("mlp", "down")
        }  # fmt: skip
        assert all(set(joined) == leaves for joined in reader.values())
        assert reader["layer_0", "attention", "query+key+value"]["bias"].shape == (96,)
        assert {leaf.dtype for leaf in jax.tree.leaves(reader)} == {jnp.dtype(jnp.bfloat16)}
