"""The benchmark of outlier channels: what it plants changes no function, and its verdict can be the opposite."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8


@pytest.mark.slow
def test_it_runs_whole(benchmark, tmp_path):
    outlier_channels = benchmark("outlier_channels")
    assert outlier_channels.main(["--self-test", "--output", str(tmp_path)]) == 0
    losses = json.loads((tmp_path / "outlier_channels.json").read_text())["losses"]
    assert list(losses) == list(outlier_channels.RUNS) and all(0 < loss < 6 for loss in losses.values())


def test_a_planted_channel_changes_the_tensors_and_not_the_function(benchmark):
    outlier_channels = benchmark("outlier_channels")
    model = fp8.GPT(fp8.GPTConfig.preset("tiny", num_layers=1), recipe=None, dtype=jnp.float32)
    tokens = jnp.arange(32, dtype=jnp.int32).reshape(2, 16)
    params = model.init(jax.random.key(0), tokens)["params"]
    planted = outlier_channels.plant(params, 2.0**16)
    changed = [not np.array_equal(*leaves) for leaves in zip(*map(jax.tree.leaves, (params, planted)), strict=True)]
    assert sum(changed) == 6  # two scales, of zero biases none, four kernels
    logits, same = (np.asarray(model.apply({"params": of}, tokens)) for of in (params, planted))
    np.testing.assert_allclose(logits, same, atol=1e-5 * np.abs(logits).max())
    wrong = outlier_channels.plant(planted, 4.0)["layer_0"]["mlp"]["up"]  # a kernel without its norm
    half = {**params, "layer_0": {**params["layer_0"], "mlp": {**params["layer_0"]["mlp"], "up": wrong}}}
    assert not np.allclose(logits, model.apply({"params": half}, tokens), atol=1e-3 * np.abs(logits).max())
    rows = outlier_channels.freeze_rows().update(jax.tree.map(jnp.ones_like, params), None, params)[0]["layer_0"]
    assert rows["mlp"]["up"]["kernel"].sum() == 127 * 512 and rows["mlp"]["down"]["kernel"].all()


def test_the_verdict(benchmark):
    judge = benchmark("outlier_channels").judge
    losses = {"bf16": 2.0, "no_outliers": 2.01, "delayed": 2.1, "current": 2.1, "block": 2.005}
    assert all(judge(losses).values())
    for name, loss in {"block": 2.03, "delayed": 2.01, "no_outliers": 2.1}.items():
        assert [run for run, holds in judge({**losses, name: loss}).items() if not holds] == [name]
    assert judge({**losses, "delayed": float("nan")})["delayed"]


def test_no_verdict_without_all_that_is_judged(benchmark):
    outlier_channels = benchmark("outlier_channels")
    losses = {"bf16": 2.0, "no_outliers": 2.01, "delayed": 2.1, "block": 2.005}
    words = {"PASS": losses, "FAIL": losses | {"block": 2.1}, "INCOMPLETE": {"bf16": 2.0, "block": 2.0}}
    for word, found in words.items():
        assert outlier_channels.markdown(found, 2.0, 1, "").splitlines()[0].endswith(f": {word}")
    with pytest.raises(SystemExit):
        outlier_channels.main(["--self-test", "--runs", "block"])
