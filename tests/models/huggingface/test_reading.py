"""What each family reads from its own fields: windows of some layers, the many defaults of Gemma 3."""

import huggingface as oracle
import pytest

import jax_fp8 as fp8
from jax_fp8.models.huggingface.config_json import read_config, write_config


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"use_sliding_window": False}, (None, None)),
        ({"use_sliding_window": True}, (None, None)),  # the window begins with layer 28
        ({"use_sliding_window": True, "max_window_layers": 1}, (64, (1,))),
        ({"use_sliding_window": True, "max_window_layers": 0}, (64, None)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None, None)),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, (64, (0,))),
    ],
    ids=str,
)
def test_windows_of_qwen2(changes, wanted):
    found = read_config(oracle.CASES["qwen2"] | changes, "here")
    assert (found.sliding_window, found.windowed_layers) == wanted
    assert read_config(write_config(found, "qwen2", "float32"), "here") == found


GEMMA3 = {
    "model_type": "gemma3_text", "vocab_size": 96, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 7,
    "num_attention_heads": 4, "query_pre_attn_scalar": 16,
}  # fmt: skip


def test_what_gemma_3_has_by_default():
    found = read_config(GEMMA3, "here")
    assert found.windowed_layers == (0, 1, 2, 3, 4, 6) and found.sliding_window == 4096
    assert (found.rotary_base, found.window_rotary_base, found.rotary_scaling) == (1e6, 1e4, None)
    assert (found.attention_scale, found.logit_cap, found.features_of_head) == (0.25, None, 256)
    assert found.norm_placement == "both" and found.zero_centered_scale and found.embedding_multiplier == 48**0.5
    linear = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    found = read_config(GEMMA3 | {"rope_parameters": linear, "sliding_window_pattern": 2}, "here")
    assert found.rotary_scaling == fp8.LinearScaling(factor=8.0) and found.windowed_layers == (0, 2, 4, 6)
    assert read_config(write_config(found, "gemma3_text", "float32"), "here") == found


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention in here must be None or False, got True"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping in here must be None, got 50.0"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar in here must be above 0, got 0.0"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern in here must be an integer of at least 1, got 0"),
        ({"sliding_window": None}, "sliding_window in here must be an integer where layers have sliding_attention"),
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            "must have an object for each of full_attention and sliding_attention",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters in here must not scale the positions of sliding_attention, got",
        ),
        ({"hidden_activation": None}, "hidden_activation in here must be 'silu' or .*, got None"),
    ],
    ids=str,
)
def test_what_of_gemma_3_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence) as raised:
        read_config(GEMMA3 | changes, "here")
    assert "\n" not in str(raised.value)
