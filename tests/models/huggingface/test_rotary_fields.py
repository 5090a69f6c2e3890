"""Rotary positions in config.json: every kind of scaling, in and out, and what is refused."""

import dataclasses
import json
import math

import huggingface as oracle
import pytest

import jax_fp8 as fp8
from jax_fp8.models.huggingface.config_json import read_config, write_config

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "wanted"),
    [
        (YARN, fp8.YarnScaling(factor=4.0, original_length=128)),
        (YARN | {"original_max_position_embeddings": 32}, fp8.YarnScaling(factor=4.0, original_length=32)),
        (
            YARN | {"original_max_position_embeddings": 32, "factor": None, "beta_fast": 0, "truncate": False},
            fp8.YarnScaling(factor=4.0, original_length=32, truncate=False),
        ),
        ({"type": "dynamic", "factor": 2}, fp8.DynamicScaling(factor=2.0, original_length=128)),
        ({"type": "linear", "factor": 2}, fp8.LinearScaling(factor=2.0)),
        (
            {
                "type": "longrope",
                "short_factor": [1] * 6,
                "long_factor": [2] * 6,
                "factor": 1.0,
                "original_max_position_embeddings": 32,
            },
            fp8.LongRopeScaling(short_factors=(1.0,) * 6, long_factors=(2.0,) * 6, original_length=32),
        ),
    ],
    ids=str,
)
def test_kinds_of_scaling(rope, wanted):
    found = read_config(oracle.LLAMA | {"rope_scaling": rope}, "here")
    assert found.rotary_scaling == wanted
    assert read_config(write_config(found, "llama", "float32"), "here") == found
    assert fp8.GPTConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(found)))) == found


def test_yarn_with_two_scales():
    rope = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}
    found = read_config(oracle.LLAMA | {"rope_scaling": rope}, "here").rotary_scaling
    assert found.amplitude == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("rope", "sentence"),
    [
        (
            YARN | {"beta_fast": 0.5},
            "here must describe a model: beta_fast of a YarnScaling must be .* above beta_slow",
        ),
        (YARN | {"truncate": 1}, "here must describe a model: truncate in here must be true or false, got 1"),
        ({"type": "linear", "factor": 0}, "here must describe a model: factor of a LinearScaling must be .* above 0"),
        (
            {"type": "longrope", "short_factor": [1] * 5, "long_factor": [2] * 5},
            "here must describe a model: a LongRopeScaling must have a factor for each of 6 pairs .*, got 5",
        ),
        (
            {"type": "longrope", "short_factor": "a", "long_factor": [2]},
            "short_factor in here must be a list of at most",
        ),
        ({"type": "longrope", "short_factor": [1]}, "must be of rope_type longrope with long_factor, with no other"),
    ],
    ids=str,
)
def test_scalings_that_are_refused(rope, sentence):
    with pytest.raises(ValueError, match=sentence) as raised:
        read_config(oracle.LLAMA | {"rope_scaling": rope}, "here")
    assert "\n" not in str(raised.value)
