"""Settings: what a preset chooses, what is written and read again, and runs that a config.json repeats."""

import dataclasses
import json

import pytest

from jax_fp8.run.settings import Settings, defaults, describe, parse, settings_from


@pytest.fixture
def config(tmp_path):
    """The config.json of a run with these flags; with changes of what it says."""

    def config(*flags, **changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"settings": describe(parse(list(flags))) | changes, "model": {}}))
        return str(path)

    return config


def test_a_preset_chooses_defaults_and_flags_win():
    assert parse([]) == defaults("tiny")
    assert (parse([]).num_layers, parse([]).tokenizer, parse([]).batch_size) == (4, "bytes", 8)
    chosen = parse("--preset gpt2-124m --seq-len 64".split())
    assert chosen == dataclasses.replace(defaults("gpt2-124m"), seq_len=64)
    assert (chosen.num_layers, chosen.tokenizer, chosen.learning_rate) == (12, "bpe", 6e-4)


def test_settings_come_back_from_json():
    chosen = parse("--data a.txt --warmup-steps 3 --mu-dtype bfloat16 --learning-rate 1 --compare".split())
    assert settings_from(json.loads(json.dumps(describe(chosen)))) == chosen
    assert settings_from({"steps": 9, "of another version": 1}) == Settings(steps=9)


def test_a_config_repeats_a_run_and_flags_win(config):
    flags = "--preset gpt2-124m --steps 7 --data a.txt --num-layers 3 --name mine --eps 1e-7".split()
    path = config(*flags, "--resume", "auto")
    assert parse(["--config", path]) == parse(flags)
    assert parse(["--config", path, "--steps", "9", "--data", "b.txt"]) == parse(
        [*flags, "--steps", "9", "--data", "b.txt"]
    )
    smaller = parse(["--config", path, "--preset", "tiny"])
    assert smaller == dataclasses.replace(parse(flags), preset="tiny", hidden_size=128, num_layers=4, num_heads=4)


def test_a_config_of_fewer_settings_has_those_of_its_preset(config, tmp_path):
    (tmp_path / "config.json").write_text('{"settings": {"preset": "gpt2-124m", "steps": 7}}')
    expected = dataclasses.replace(defaults("gpt2-124m"), steps=7)
    assert parse(["--config", str(tmp_path / "config.json")]) == expected


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"restarts": 1, "seed": 0, "a": 2}, "got settings that this version does not know: 'a', 'restarts' in"),
        ({"steps": "many"}, "got settings whose steps is 'many' in"),
        ({"steps": True}, "got settings whose steps is True in"),
        ({"recipe": "fp4"}, "got settings whose recipe is 'fp4' in"),
        ({"preset": ["tiny"]}, r"got settings whose preset is \['tiny'\] in"),
        ({"preset": "gpt5"}, "gpt2-124m"),
        ({"data": 3}, "got settings whose data is 3 in"),
    ],
)
def test_a_config_that_cannot_be_repeated(changes, sentence, config):
    with pytest.raises(ValueError, match=sentence) as raised:
        parse(["--config", config(**changes)])
    assert str(raised.value).startswith("--config must be the config.json of a run of this version, got ")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"settings": []}', '{"model": {}}'])
def test_a_config_that_is_damaged(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"--config must be the config.json of a run of this version, got "):
        parse(["--config", str(tmp_path / "config.json")])
    with pytest.raises(ValueError, match="got No such file or directory in nowhere"):
        parse(["--config", "nowhere"])


def test_a_model_to_begin_with_chooses_other_defaults(config):
    chosen = parse(["--init-from", "a/model"])
    assert (chosen.preset, chosen.tokenizer, chosen.hidden_size, chosen.num_layers) == ("", "", 0, 0)
    assert (chosen.learning_rate, chosen.steps, chosen.seq_len) == (2e-5, 1000, 1024)
    assert settings_from(json.loads(json.dumps(describe(chosen)))) == chosen
    assert parse(["--config", config("--init-from", "a/model", "--steps", "7")]) == dataclasses.replace(chosen, steps=7)
    begun = parse(["--config", config("--steps", "7"), "--init-from", "a/model"])
    assert (begun.preset, begun.hidden_size, begun.init_from, begun.steps) == ("", 0, chosen.init_from, 7)
