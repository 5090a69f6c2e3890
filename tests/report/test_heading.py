"""The head of a report, and its key numbers."""

import re

import pytest
from run_logs import healthy

from jax_fp8.report.heading import heading, last_step, tiles
from jax_fp8.report.run_folder import read_run


def words_of(markup: str) -> str:
    return " ".join(re.sub("<.*?>", " ", markup).replace("\u00a0", " ").split())


def test_what_was_trained(tmp_path):
    log = healthy()
    log.config["settings"]["fast"] = True
    words = words_of(heading(read_run(log.write(tmp_path / "mine"))))
    assert words.startswith("mine tiny, 2 layers, 256 wide, 8 heads, 512 tokens in the vocabulary recipe delayed, fast")
    assert "8 x 128 tokens a step, on 1 x NVIDIA H200" in words and "Step 400 of 400 was reached." in words
    assert re.search(r"Files written \d{4}-\d\d-\d\d \d\d:\d\d UTC\.", words)


@pytest.mark.parametrize("config", [{}, {"settings": None, "model": [1], "device": None}])
def test_without_a_config_it_says_less(tmp_path, config):
    log = healthy()
    log.config = config
    words = words_of(heading(read_run(log.write(tmp_path / "mine"))))
    assert words.startswith("mine Files written") and words.endswith("Step 400 was reached.")


def test_key_numbers_have_units_and_peaks_their_labels(tmp_path):
    log, other = healthy(), healthy(run="bf16", seed=1)
    log.metrics[-1] |= {"loss": 3.141, "val_loss": 3.25, "tokens_per_second": 92_345, "peak_memory_gib": 34.72}
    other.metrics[-1] |= {"loss": 3.0, "bf16_utilization": 0.5}
    log.metrics += other.metrics
    log.events = [
        {"run": "delayed", "step": 27, "event": "skipped"},
        {"run": "delayed", "step": 28, "event": "stopped"},
    ]
    words = words_of(tiles(read_run(log.write(tmp_path / "mine"))))
    for text in (
        "Training loss 3.14 nats a token, step 400; bf16: 3",
        "Validation loss 3.25",
        "Throughput 92,345 tokens/s",
        "Model operations 612 TFLOP/s a device",
        "Utilization 62 % of the bfloat16 peak; 31 % of the FP8 peak; bf16: 50 %",
        "Peak memory 34.7 GiB of the first device",
        "Skipped 1 step they",
    ):
        assert text in words, words


def test_what_was_not_measured_has_no_tile(tmp_path):
    log = healthy()
    for row in log.metrics:
        for name in ("model_tflops", "bf16_utilization", "fp8_utilization", "peak_memory_gib"):
            del row[name]
    words = words_of(tiles(read_run(log.write(tmp_path / "mine"))))
    assert "Throughput" in words
    assert not any(name in words for name in ("Model operations", "Utilization", "Peak memory", "Skipped"))


def test_the_last_step_is_that_of_any_file(tmp_path):
    log = healthy()
    log.events = [{"run": "delayed", "step": 405, "event": "stopped"}]
    assert last_step(read_run(log.write(tmp_path / "mine"))) == 405
