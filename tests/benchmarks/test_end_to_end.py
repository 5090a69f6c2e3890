"""The benchmarks run end to end with a tiny model, and what they conclude can also be the opposite.

Times mean nothing here: variants train the same model, kernels land in their category, verdicts follow from losses.
"""

import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest


@pytest.mark.slow
def test_gpt_step_runs_whole(benchmark, tmp_path):
    gpt_step = benchmark("gpt_step")
    assert gpt_step.main(["--self-test", "--variants", "bf16", "delayed", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gpt_step.json").read_text())
    shapes = [(row["shape"], row["variant"]) for row in rows]
    names = "tiny", "tiny_llama", "tiny_moe"
    assert shapes == [(shape, variant) for shape in names for variant in ("bf16", "delayed")]
    assert all(one["num_params"] == other["num_params"] for one, other in zip(rows[::2], rows[1::2], strict=True))
    assert all(row["step_ms"] > 0 and row["last_loss"] < row["first_loss"] for row in rows)
    assert "| jax_fp8, `DelayedScaling` |" in (tmp_path / "gpt_step.md").read_text()


@pytest.mark.slow
def test_scaling_runs_whole(benchmark, tmp_path):
    scaling = benchmark("scaling")
    assert scaling.main(["--self-test", "--variants", "current", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert [(row["variant"], row["tokens"]) for row in rows] == [("bf16", 32), ("current", 32)]
    ratio = rows[0]["step_ms"] / rows[1]["step_ms"]
    assert f"{ratio:.2f} ({rows[1]['step_ms']:.2f})" in (tmp_path / "scaling.md").read_text()
    assert scaling.shape_of(12288, 8192, 2048).num_layers == 1


def test_a_variant_that_fails_is_a_row_that_says_so(benchmark, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    assert benchmark("gpt_step").main(["--self-test", "--variants", "bf16", "--output", str(tmp_path)]) == 1
    assert "failed: RuntimeError: Unable to initialize backend 'abacus'" in (tmp_path / "gpt_step.md").read_text()


@pytest.mark.parametrize("variant", ["flax_direct", "ours_bf16", "current", "block_head_cached", "delayed_fast_head"])
def test_every_variant_trains_the_same_model(benchmark, variant):
    gpt_step = benchmark("gpt_step")
    shape = gpt_step.SHAPES["tiny"]
    found = gpt_step.measure(gpt_step.Job(variant, shape, microbatches=2, steps=1, profile=False))
    hidden, vocab = shape.hidden_size, shape.vocab_size
    block = 12 * hidden**2 + 13 * hidden
    assert found["num_params"] == (vocab + shape.seq_len) * hidden + shape.num_layers * block + 2 * hidden
    assert found["tokens"] == 2 * shape.batch_size * shape.seq_len
    assert abs(found["first_loss"] - np.log(vocab)) < 0.3
    assert found["last_loss"] < found["first_loss"]


def test_a_tuned_variant_needs_its_table(benchmark):
    gpt_step = benchmark("gpt_step")
    with pytest.raises(ValueError, match="GEMMs are tuned on the GPU that will run them"):
        gpt_step.measure(gpt_step.Job("delayed_fast_tuned", gpt_step.SHAPES["tiny"], 1, 1, False))


def test_a_profile_that_fails_costs_no_times(benchmark, tmp_path):
    gpt_step = benchmark("gpt_step")
    found = gpt_step.measure(gpt_step.Job("bf16", gpt_step.SHAPES["tiny"], microbatches=1, steps=1, profile=True))
    assert "kernels of a GPU stream" in found["profile_failed"]  # the CPU has none
    page = gpt_step.markdown("tiny", gpt_step.SHAPES["tiny"], 1, [found])
    assert f"{found['step_ms']:.1f}" in page
    assert "No profile of bf16: the trace must hold" in page


@pytest.mark.slow
def test_run_costs_runs_whole(benchmark, tmp_path):
    assert benchmark("run_costs").main(["--self-test", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "run_costs.json").read_text())
    assert [row["variant"] for row in found["steps"]][:2] == ["plain", "diagnosed every 10 steps"]
    assert len(found["bits"]) == 6 and all(found["bits"].values())
    assert all(save["written_after_s"] >= save["blocked_s"] > 0 for save in found["saving"]["saves"])
    assert "| diagnosed every step |" in (tmp_path / "run_costs.md").read_text()


def test_generate_compares_with_the_full_pass(benchmark):
    generate = benchmark("generate")
    config = generate.fp8.GPTConfig.preset("tiny", num_layers=1, hidden_size=32, max_seq_len=16)
    model, prompt = generate.fp8.GPT(config, recipe=None), np.arange(24, dtype=np.int32).reshape(2, 12)
    variables = generate.variables_of(model)
    written = generate.fp8.generate(model, variables, prompt, max_new_tokens=4)
    assert generate.compare(model, variables, prompt, written)["shortfall"] < 0.1
    wrong = generate.compare(model, variables, prompt, written[:, ::-1])
    assert wrong["shortfall"] > 0.5 and wrong["most_likely"] < 1


@pytest.mark.slow
def test_optimizer_step_runs_whole(benchmark, tmp_path):
    optimizer_step = benchmark("optimizer_step")
    variants = ["optax", "in_place", "remainder"]
    assert optimizer_step.main(["--self-test", "--variants", *variants, "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "optimizer_step.json").read_text())["results"]
    assert [row["variant"] for row in rows] == variants
    assert all(row["ms"] > 0 and row["bytes_a_second"] > 0 for row in rows)
    page = (tmp_path / "optimizer_step.md").read_text()
    assert "| copy |" in page
    assert "| `fused_adamw` |" in page


@pytest.mark.parametrize(
    ("name", "apart", "kernel"), [("optax", 26, 6), ("in_place", 26, 2), ("bf16_params", 22, 2), ("by_tile", 26, 2)]
)
def test_bytes_of_an_optimizer_step(benchmark, name, apart, kernel):
    """Per parameter: gradient read, moments and master read and written;
    per kernel of a GEMM its two casts on top, and its second read.
    """
    import jax
    import jax.numpy as jnp

    optimizer_step = benchmark("optimizer_step")
    params = {"norm": jnp.ones((64,)), "up": {"kernel": jnp.ones((32, 16))}}
    variant = optimizer_step.VARIANTS[name]
    params = jax.tree.map(lambda p: p.astype(variant.param_dtype), params)
    casts = {path: optimizer_step.first_cast(p) for path, p in optimizer_step.gemm_kernels(params).items()}
    state = params, variant.optimizer().init(params), casts
    gradients = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    count = 2 * 4  # of steps
    assert optimizer_step.bytes_moved(variant, state, gradients) == apart * (64 + 512) + kernel * 512 + count


def test_an_optimizer_that_does_nothing_has_no_time(benchmark):
    import jax
    import jax.numpy as jnp

    optimizer_step = benchmark("optimizer_step")
    params, variant = {"up": {"kernel": jnp.linspace(-1, 1, 32 * 16).reshape(32, 16)}}, optimizer_step.VARIANTS["optax"]
    before, (path,) = optimizer_step.samples(params), optimizer_step.gemm_kernels(params)
    moved = jax.tree.map(lambda p: p + 1, params)
    casts, fresh = ({path: optimizer_step.first_cast(tree["up"]["kernel"])} for tree in (params, moved))
    scales = jnp.stack([casts[path].rowwise.scale])
    optimizer_step.check(variant, before, (moved, None, fresh), jnp.stack([fresh[path].rowwise.scale]))
    with pytest.raises(ValueError, match="1 stood still, 0 are not finite and 0 have other FP8 values"):
        optimizer_step.check(variant, before, (params, None, casts), scales)
    with pytest.raises(ValueError, match="0 stood still, 0 are not finite and 1 have other FP8 values"):
        optimizer_step.check(variant, before, (moved, None, casts), scales)


@pytest.mark.slow
def test_microbatches_runs_whole(benchmark, tmp_path):
    microbatches = benchmark("microbatches")
    assert microbatches.main(["--self-test", "--variants", "cached", "caller", "small", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "microbatches.json").read_text())
    rows = [(row["variant"], row["microbatches"]) for row in found["tiny"]]
    assert rows == [("cached", 1), ("cached", 8), ("caller", 8)]
    assert all(row["waited_ms"] > row["host_ms"] > 0 < row["ms_a_microbatch"] for row in found["tiny"])
    assert found[microbatches.LONG_RUN][0]["compiled_first"] == 2  # the warm start and the step
    assert "| bf16 / delayed |" in (tmp_path / "microbatches.md").read_text()


@pytest.mark.parametrize(("again", "compiled"), [(False, (1, 0)), (True, (1, 9))])
def test_a_long_run_counts_compilations(benchmark, again, compiled):
    import jax
    import jax.numpy as jnp

    once = jax.jit(lambda loss: loss - 1)

    def step(state, batch):
        loss = jax.jit(lambda loss: loss - 1)(state) if again else once(state)
        return loss, {"loss": loss}

    training = SimpleNamespace(tokens=np.zeros, new_state=lambda: jnp.float32(100), make_step=lambda count: step)
    found = benchmark("microbatches").long_run(training, steps=10)
    assert (found["compiled_first"], found["compiled_later"]) == compiled
    assert ("failed" in found) == again


def test_a_step_that_fails_or_learns_nothing_says_so(benchmark):
    import jax
    import jax.numpy as jnp

    def fails(state):
        raise jax.errors.JaxRuntimeError("no memory\nand more")

    microbatches = benchmark("microbatches")
    runs = {"uncached": fails, "cached": lambda x: (x + 1, {"loss": 1 / x}), "caller": lambda x: (x, {"loss": x - x})}
    training = microbatches.Training(microbatches.SHAPES["tiny"])
    state, found = microbatches.take_turns(training, jnp.float32(0.5), runs, rounds=2, steps=3)
    assert float(state) == 0.5 + 1 + 2 * (1 + 1 + 4)  # the first step; in every round one untimed, one alone, a row
    assert len(found["cached"].in_a_row) == 2 * (3 - 1)  # the last end of a row was not seen late like the others
    rows = [{"variant": name, "microbatches": 2, **times.to_json(2)} for name, times in found.items()]
    for row, failed in zip(rows, ("no memory", "", "a step that trains"), strict=True):
        assert row["failed"].startswith(failed) and bool(row["failed"]) == bool(failed)
    assert microbatches.shape_table(rows).splitlines()[-1].split(" | ")[2:5] == ["-", "-", "-"]  # uncached, difference


def test_different_models_are_not_compared(benchmark):
    with pytest.raises(ValueError, match="same number of parameters"):
        benchmark("gpt_step").check_same_work(
            [{"variant": "bf16", "num_params": 10}, {"variant": "delayed", "num_params": 11}]
        )


def test_plain_microbatches_accumulate_the_gradient_of_the_whole_batch(benchmark):
    """The same loss and update from one batch of four and from two of two: without FP8 only rounding differs."""
    import jax
    import optax

    plain_gpt = benchmark("plain_gpt")
    model = plain_gpt.PlainGPT(vocab_size=64, num_layers=1, num_heads=2, hidden_size=32, max_seq_len=16)
    tokens = jax.random.randint(jax.random.key(0), (4, 17), 0, 64)
    losses = []
    for microbatches in (1, 2):
        variables = jax.jit(model.init)(jax.random.key(1), tokens[:, :-1])
        tx = optax.sgd(1.0)
        step = plain_gpt.make_plain_step(plain_gpt.plain_loss(model), tx, microbatches)
        state = (dict(variables), tx.init(variables["params"]))
        state, first = step(state, tokens)
        state, second = step(state, tokens)
        losses.append([float(first["loss"]), float(second["loss"])])
    assert losses[0][1] < losses[0][0] - 0.1
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-3)


def runs_ending_at(convergence, **losses):
    return {name: convergence.Run(name, np.full(20, loss), [(20, loss)], seconds=1.0) for name, loss in losses.items()}


@pytest.mark.parametrize(
    ("verdict", "losses"),
    [
        ("PASS", {"bf16": 3.0, "delayed": 3.029, "block": 2.971, "frozen": 3.5}),
        ("PASS", {"bf16": 3.0, "delayed": 3.0, "current": 3.0, "frozen": float("nan")}),
        ("FAIL", {"bf16": 3.0, "delayed": 3.031, "current": 3.0, "frozen": 3.5}),
        ("FAIL", {"bf16": 3.0, "delayed": 3.0, "current": float("nan"), "frozen": 3.5}),
        ("FAIL", {"bf16": 3.0, "delayed": 3.0, "current": 3.0, "frozen": 3.02}),
        ("FAIL", {"bf16": 3.0, "delayed": 3.0, "current": 3.0, "frozen": 2.9}),
        ("FAIL", {"bf16": 3.0, "delayed": 3.0, "fastest": 3.05, "frozen": 3.5}),
        ("INCOMPLETE", {"bf16": 3.0, "delayed": 3.0}),
        ("INCOMPLETE", {"bf16": 3.0, "frozen": 3.5}),
    ],
)
def test_the_verdict_follows_from_the_losses(benchmark, verdict, losses):
    convergence = benchmark("convergence")
    assert convergence.judge(runs_ending_at(convergence, **losses))[0] == verdict


RUNS = ("frozen", "bf16", "delayed")  # the control shares a program with the run before it


@pytest.mark.slow
def test_convergence_runs_whole(tmp_path):
    """FP8 is close to bfloat16 after a few steps of a tiny model, and the control is not: the verdict is real.

    In a process of its own: hundreds of steps take half the time when they are compiled with optimizations,
    unlike other tests.
    """
    root = pathlib.Path(__file__).parents[2]
    python_path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    flags = (
        "--xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1 "
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    )
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": python_path}
    command = [sys.executable, str(root / "benchmarks/convergence.py"), "--self-test", "--runs", *RUNS]
    done = subprocess.run([*command, "--output", str(tmp_path), "--cache", str(tmp_path)], env=environment)
    assert done.returncode == 0
    summary = json.loads((tmp_path / "convergence.json").read_text())
    assert summary["verdict"] == "PASS"
    losses = {row["run"]: row["validation_loss"] for row in summary["runs"]}
    assert len(set(losses.values())) == len(RUNS)  # different computations
    assert max(losses.values()) < np.log(512) - 0.5
    curves = [json.loads(line) for line in (tmp_path / "convergence.jsonl").read_text().splitlines()]
    assert {row["run"] for row in curves} == set(losses) == set(RUNS)
    assert (tmp_path / "convergence.png").stat().st_size > 10_000
    assert "FP8 learns like bfloat16: PASS" in (tmp_path / "convergence.md").read_text()


def test_runs_without_their_reference_are_one_sentence(benchmark, tmp_path, capsys):
    convergence = benchmark("convergence")
    assert convergence.main(["--self-test", "--runs", "delayed", "frozen", "--output", str(tmp_path)]) == 2
    assert "--runs must include bf16, which the others are compared with, got delayed frozen" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_too_little_text_is_one_sentence(benchmark, tmp_path, capsys):
    convergence = benchmark("convergence")
    book = tmp_path / "book.txt"
    book.write_text("a few words " * 50)
    arguments = ["--self-test", "--data", str(book), "--output", str(tmp_path), "--cache", str(tmp_path)]
    assert convergence.main(arguments) == 2
    assert "held-out text must have at least" in capsys.readouterr().err


def test_windows_of_an_epoch_do_not_repeat(benchmark):
    text_data = benchmark("text_data")
    reading = text_data.Reading(seq_len=8, batch_size=4, steps=30)
    order = text_data.window_order(8 * 40 + 1, reading)
    assert order.shape == (30, 4)
    first, second = order.ravel()[:40], order.ravel()[40:80]
    assert sorted(first) == sorted(second) == list(range(0, 320, 8))
    assert list(first) != list(second)
    np.testing.assert_array_equal(order, text_data.window_order(8 * 40 + 1, reading))
