"""The benchmark of a mixture's curves: what it measures, and a verdict that can be the opposite."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8

BOUNDS = 0.005, 0.01


@pytest.fixture
def curves(benchmark):
    return benchmark("mixture_curves")


@pytest.mark.slow
def test_it_runs_whole(tmp_path):
    """In a process of its own: hundreds of steps take half the time when they are compiled with optimizations."""
    root = pathlib.Path(__file__).parents[2]
    python_path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    flags = (
        "--xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1 "
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    )
    command = [sys.executable, str(root / "benchmarks/mixture_curves.py"), "--self-test", "--name", "mixture"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path), "--cache", str(tmp_path)],
        env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": python_path},
    )
    assert done.returncode == 0
    found = json.loads((tmp_path / "mixture.json").read_text())
    runs = {(run["recipe"], run["balance"], run["seed"]): run["points"] for run in found["runs"]}
    wanted = {(name, how, seed) for name in ("bf16", "delayed", "block") for how in ("aux", "bias") for seed in (0, 1)}
    assert runs.keys() == wanted | {("frozen", "aux", 0), ("frozen", "bias", 0), ("delayed", "none", 0)}
    assert len({points[-1]["validation_loss"] for points in runs.values()}) == len(runs)  # different computations
    for points in runs.values():
        assert [point["step"] for point in points] == [80, 160, 240]
        assert points[-1]["training_loss"] < points[0]["training_loss"] < np.log(384)
        assert all(1 <= load <= 2 for point in points for load in point["loads"])
    assert (tmp_path / "mixture.png").stat().st_size > 10_000
    assert "A mixture of experts learns in FP8 as in bfloat16: PASS" in (tmp_path / "mixture.md").read_text()


def test_the_validation_loss_has_no_router_loss(curves):
    program = curves.Program("bf16", "aux", dataclasses.replace(curves.SELF_TEST, aux_loss=3.0))
    tokens = jax.random.randint(jax.random.key(0), (4, 33), 0, 300)
    variables = program.initial_state(0, tokens).variables
    loss, shares = program.evaluate(variables, tokens)
    logits = program.model.apply(variables, tokens[:, :-1]).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    np.testing.assert_allclose(loss, -jnp.mean(chosen), rtol=1e-3)
    assert jax.jit(fp8.next_token_loss(program.model))(variables, tokens) > loss + 2.5
    assert shares.shape == (1, 4)
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-6)


def test_all_runs_of_a_seed_start_alike(curves):
    tokens = jnp.zeros((1, 33), jnp.int32)

    def params(recipe, balance, seed=0):
        found = curves.Program(recipe, balance, curves.SELF_TEST).initial_state(seed, tokens).params
        return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(found)}

    first = params("bf16", "aux")
    biased = params("delayed", "bias")
    (bias,) = biased.keys() - first.keys()
    assert "correction_bias" in bias and not biased[bias].any()
    for name, leaf in first.items():
        np.testing.assert_array_equal(leaf, biased[name])
    assert any((leaf != first[name]).any() for name, leaf in params("bf16", "aux", seed=1).items())


def test_a_load_is_that_of_all_validation_tokens(curves):
    """Each batch has another busy expert, together they use three of four evenly; the other layer uses one alone."""
    shares = [[[0.5, 0.25, 0.25, 0.0], [1.0, 0, 0, 0]], [[1 / 6, 5 / 12, 5 / 12, 0.0], [1.0, 0, 0, 0]]]
    found = iter([(jnp.float32(2), jnp.array(shares[0])), (jnp.float32(3), jnp.array(shares[1]))])
    program = SimpleNamespace(evaluate=lambda variables, batch: next(found))
    loss, loads = curves.Program.validate(program, SimpleNamespace(variables=None), [None, None])
    assert loss == 2.5
    np.testing.assert_allclose(loads, [4 / 3, 4], rtol=1e-6)


def runs_ending_at(curves, losses, loads=None):
    """Runs of two steps; `losses` has those of all seeds by "recipe balance", `loads` the last loads."""
    loads = {"delayed none": 3.0} | (loads or {})

    def points(name, loss):
        return [curves.Point(step, loss, loss, [1.5, loads.get(name, 1.5)]) for step in (1, 2)]

    return [
        curves.Run(*name.split(), seed, points(name, loss), 1.0)
        for name, of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
    ]


USUAL = {"bf16 aux": (3.0, 3.006), "delayed aux": (3.0, 3.0), "block aux": (3.01, 3.01), "frozen aux": (3.5,)}
USUAL |= {"delayed none": (3.1,)}
BIASED = {"bf16 bias": (3.1, 3.1), "delayed bias": (3.1, 3.1), "frozen bias": (3.5,)}


@pytest.mark.parametrize(
    ("verdict", "changed"),
    [
        ("PASS", {}),
        ("PASS", BIASED),
        ("PASS", {"delayed aux": (2.95, 3.05)}),  # means are compared
        ("FAIL", {"delayed aux": (3.0, 3.04)}),
        ("FAIL", {"block aux": (2.98, 2.98)}),
        ("FAIL", {"block aux": (3.0, float("nan"))}),
        ("FAIL", {"bf16 aux": (float("nan"), 3.0)}),
        ("FAIL", {"frozen aux": (3.01,)}),
        ("FAIL", {"frozen aux": (2.9,)}),
        ("PASS", {"frozen aux": (float("nan"),)}),
        ("FAIL", BIASED | {"frozen bias": (3.11,)}),
        ("FAIL", BIASED | {"delayed bias": (3.12, 3.12)}),
        ("PASS", {"bf16 aux": (3.0, 3.018), "block aux": (3.035, 3.035)}),  # noise of 0.6 % allows 0.86 %
        ("FAIL", {"bf16 aux": (3.0, 3.3), "block aux": (3.19, 3.19)}),  # and no noise allows 1.3 %
    ],
)
def test_the_verdict_follows_from_the_losses(curves, benchmark, verdict, changed):
    assert benchmark("mixture_results").judge(runs_ending_at(curves, USUAL | changed), BOUNDS)[0] == verdict


def test_the_verdict_follows_from_the_loads(curves, benchmark):
    judge = benchmark("mixture_results").judge
    verdict, rows = judge(runs_ending_at(curves, USUAL | BIASED, {"delayed bias": 3.5}), BOUNDS)
    assert verdict == "FAIL"
    assert [(row["recipe"], row["balance"]) for row in rows if row.get("as_required") is False] == [("delayed", "none")]
    assert judge(runs_ending_at(curves, USUAL | BIASED, {"delayed bias": 2.5}), BOUNDS)[0] == "PASS"


@pytest.mark.parametrize(
    "left_out", [["frozen aux"], ["delayed none"], ["delayed aux", "delayed none", "frozen aux"], ["frozen bias"]]
)
def test_no_verdict_without_controls(curves, benchmark, left_out):
    losses = {name: of_seeds for name, of_seeds in (USUAL | BIASED).items() if name not in left_out}
    assert benchmark("mixture_results").judge(runs_ending_at(curves, losses), BOUNDS)[0] == "INCOMPLETE"


def test_results_are_written_of_what_there_is(curves, tmp_path):
    settings = dataclasses.asdict(curves.Settings())
    first = runs_ending_at(curves, {"bf16 aux": (3.0, 3.006)})
    assert curves.write_results(tmp_path / "early", first, "a title", "a text", settings) == "INCOMPLETE"
    runs = runs_ending_at(curves, USUAL | BIASED)
    assert curves.write_results(tmp_path / "all", runs, "a title", "a text", settings) == "PASS"
    page = (tmp_path / "all.md").read_text()
    assert "| block | aux | 2 | 3.0100, 3.0100 | +0.233 % | within 0.50 % | yes | 1.50 | 1.50 | 1, 1 |" in page
    assert "| delayed | none | 2 | 3.1000 | - | load above 1.50 | yes | 2.25 | 3.00 | 1 |" in page
    assert "at least 0.5 % and at most 1 %." in page
    assert min(picture.stat().st_size for picture in tmp_path.glob("*.png")) > 10_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--recipes", "delayed"], "--recipes must include bf16, which the others are compared with, got delayed"),
        (["--seeds", "1"], "--seeds must be at least 2, because their difference is the noise, got 1"),
        (["--steps", "100"], "--steps must be a multiple of --evaluate-every 80, and from 1 to --steps 100, got 100"),
        (["--control-steps", "320"], "--control-steps must be a multiple of --evaluate-every 80, and from 1 to"),
    ],
)
def test_settings_that_do_not_fit_are_one_sentence(curves, tmp_path, capsys, arguments, sentence):
    assert curves.main(["--self-test", *arguments, "--output", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
