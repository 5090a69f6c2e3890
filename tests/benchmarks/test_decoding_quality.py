"""Needles in windows, the verdict, and the whole benchmark with a tiny model."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def test_a_needle_is_somewhere_and_at_the_end(benchmark):
    quality = benchmark("decoding_quality")
    windows = jnp.zeros((64, 41), jnp.int32)
    found = np.asarray(quality.with_needles(windows, jax.random.key(0), vocab_size=100))
    size = quality.NEEDLE + 2
    assert (found[:, -size : -size + 2] == [98, 99]).all() and found.max() == 99
    places = (found[:, :-size] == 98).argmax(axis=1)
    for row, place in zip(found, places, strict=True):
        np.testing.assert_array_equal(row[place : place + size], row[-size:])
        assert place + 2 * size <= 41 and (row == 98).sum() == 2
    assert len(set(places)) > 10 and len({tuple(row[-size:]) for row in found}) == 64


def test_the_verdict(benchmark):
    quality = benchmark("decoding_quality")

    def rows(delayed, control):
        return [{"way": "delayed", "perplexity": delayed}, {"way": "control", "perplexity": control}]

    assert quality.verdict(rows(-0.0009, 0.01)) == "PASS"
    for wrong in (rows(0.0011, 0.01), rows(-0.0011, 0.01), rows(0.0, 0.0009), rows(float("nan"), 0.01)):
        assert quality.verdict(wrong) == "FAIL"


def test_losses_behind_a_prompt_are_those_of_the_full_pass(benchmark):
    quality = benchmark("decoding_quality")
    config = quality.fp8.GPTConfig.preset("tiny", num_layers=1, vocab_size=128, max_seq_len=24)
    model = quality.fp8.GPT(config, recipe=None, dtype=jnp.float32)
    windows = jax.random.randint(jax.random.key(1), (3, 25), 0, 128)
    variables = jax.jit(model.init)(jax.random.key(0), windows[:, :-1])
    whole = quality.full_pass(model, variables, windows, prompt=7)
    for values, same in ((1.0, True), (0.5, False)):
        read = quality.from_cache(model, None, variables, windows, values, prompt=7)
        assert read[0].shape == read[1].shape == (3, 18)
        assert np.allclose(read[0], whole[0], atol=1e-5) == same


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--prompt", "45"], "--prompt must be at least 1 and leave 20 tokens of the 64 of a window, got 45"),
        (["--prompt", "0"], "--prompt must be at least 1"),
        (["--windows", "6"], "--windows must be a multiple of 4 up to the 16 held-out windows, got 6"),
        (["--windows", "20"], "got 20"),
    ],
)
def test_sizes_that_do_not_fit(benchmark, options, sentence, capsys):
    assert benchmark("decoding_quality").main(["--self-test", *options]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs_whole(benchmark, tmp_path):
    assert benchmark("decoding_quality").main(["--self-test", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "decoding_quality.json").read_text())
    assert found["verdict"] == "PASS" and len(found["rows"]) == 5
    assert "| delayed, fp8 cache |" in (tmp_path / "decoding_quality.md").read_text()
