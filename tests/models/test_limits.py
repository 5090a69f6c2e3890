"""Shapes that come from files: every preset is within the limits, and what is beyond them is refused at once."""

import dataclasses
import json
import time

import pytest

import jax_fp8 as fp8
from jax_fp8.models.config import PRESETS
from jax_fp8.models.limits import MOST, check_limits, config_of

TINY = dataclasses.asdict(fp8.GPTConfig.preset("tiny"))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_within_the_limits(name):
    described = json.loads(json.dumps(dataclasses.asdict(PRESETS[name])))
    assert config_of(described, "here") == PRESETS[name]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        *(
            ({name: most + 1}, f"{name} in here must be at most {most:,}, got {most + 1}")
            for name, most in MOST.items()
        ),
        ({"num_layers": 10**9}, "num_layers in here must be at most 4,096, got 1000000000; no model is that large"),
        ({"vocab_size": 10**400}, "vocab_size in here must be at most 16,777,216, got 1000"),
        ({"hidden_size": float("nan")}, "hidden_size in here must be at most"),
        ({"num_layers": 4096, "num_experts": 16_384}, "here must have layers and experts for at most 2,097,152"),
        ({"num_layers": -1}, "here must describe a model: num_layers must be an integer of at least 0, got -1"),
        ({"num_heads": "4"}, "here must describe a model: num_heads must be an integer"),
        ({"norm": ["rmsnorm"]}, "here must describe a model: "),
        ({"activation": {}}, "here must describe a model: "),
        ({"rotary_scaling": {"fact": 1}}, "here must describe a model: "),
        ({"rotary_scaling": 5}, "here must describe a model: "),
        ({"rotary_scaling": {"factor": 10**400}}, "here must describe a model: int too large to convert to float"),
        (
            {"positions": "rotary", "rotary_scaling": {"factor": 8, "original_length": 2**63}},
            "here must describe a model: original_length of a RotaryScaling must be at most 2,147,483,647, got 9223",
        ),
        ({"norm_epsilon": 10**400}, "here must describe a model: int too large to convert to float"),
        ({"unknown": 5}, "here must describe a model: a GPTConfig is made of its fields"),
    ],
    ids=str,
)
def test_shapes_of_no_model(changes, sentence):
    config_of(TINY, "here")
    began = time.monotonic()
    with pytest.raises(ValueError, match=sentence) as raised:
        config_of(TINY | changes, "here")
    assert time.monotonic() - began < 1
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_whole_numbers_become_floats():
    """Or jax would take them for int32, in which 2**63 has no room."""
    changes = {"positions": "rotary", "rotary_base": 2**63, "rotary_scaling": {"factor": 2**63}}
    found = config_of(TINY | changes, "here")
    assert isinstance(found.rotary_base, float) and isinstance(found.rotary_scaling.factor, float)
    assert (found.rotary_base, found.rotary_scaling.factor) == (2.0**63, 2.0**63)


def test_what_describes_nothing():
    for described in ([], None, 5, "tiny"):
        with pytest.raises(ValueError, match="here must describe a model by the fields of a GPTConfig, got "):
            config_of(described, "here")
    lacking = {name: value for name, value in TINY.items() if name != "hidden_size"}
    with pytest.raises(ValueError, match=r"here must describe a model: .*hidden_size"):
        config_of(lacking, "here")
    with pytest.raises(ValueError, match="num_hidden_layers in here must be at most"):
        check_limits({"num_layers": 10**9}, "here", {"num_layers": "num_hidden_layers"})
