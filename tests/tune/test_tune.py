"""tune: which candidate is taken, from times and errors that are made up; which GEMMs a program has;
what is remembered.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import jax_fp8 as fp8
from jax_fp8.kernels.tuned_gemms import MAX_CANDIDATES, GemmProblem
from jax_fp8.tune import tune as tune_module
from jax_fp8.tune.gemm_bench import OffTheList, Refused
from jax_fp8.tune.gemm_table import Choice, GemmTable
from jax_fp8.tune.tune import choose, list_fp8_gemms, tune, tune_problems

HERE = GemmTable("NVIDIA H200", "13.1.0")
PROBLEMS = [
    GemmProblem(m, 48, 64, "float8_e4m3fn", "float8_e4m3fn", "bfloat16", False, False, "fast") for m in (16, 32)
]


class FakeBench:
    """Times by candidate, in microseconds, a list being one a call; errors and refusals; what was asked for."""

    def __init__(self, times, errors=None, refused=(), offered=None):
        self.times = {candidate: [t] if isinstance(t, int | float) else list(t) for candidate, t in times.items()}
        self.errors, self.refused, self.offered = errors or {}, refused, len(times) if offered is None else offered
        self.asked = []

    def error(self, candidate):
        self.asked.append(candidate)
        if candidate >= self.offered:
            raise OffTheList("no such rank")
        if candidate in self.refused:
            raise Refused("does not run")
        return self.errors.get(candidate, 0.5)

    def seconds(self, candidate):
        times = self.times[candidate]
        return (times.pop(0) if len(times) > 1 else times[0]) * 1e-6


def chosen(*args, **kwargs):
    choice = choose(FakeBench(*args, **kwargs))
    return choice.candidate, round(choice.first_us, 3), round(choice.best_us, 3)


def test_the_fastest_is_chosen():
    assert chosen({0: 100, 1: 97, 2: 90, 3: 95}) == (2, 100, 90)
    assert chosen({0: 100, 1: 110}) == (0, 100, 100)
    assert chosen({0: 100}) == (0, 100, 100)


def test_one_percent_is_noise():
    assert chosen({0: 100, 1: 99.1}) == (0, 100, 100)
    assert chosen({0: 100, 1: 98.9}) == (1, 100, 98.9)


def test_the_first_choice_counts_at_its_best_and_the_winner_at_its_worst():
    assert chosen({0: [100, 92], 1: 93}) == (0, 92, 92)  # the clock rose in between
    assert chosen({0: [92, 100], 1: 93}) == (0, 92, 92)  # it fell
    assert chosen({0: 100, 1: [90, 99.5]}) == (0, 100, 100)  # a lucky sample
    assert chosen({0: 100, 1: [90, 95]}) == (1, 100, 95)


@pytest.mark.parametrize("error", [1.01, math.inf, math.nan])
def test_another_product_is_not_taken(error):
    choice = choose(FakeBench({0: 100, 1: 50, 2: 90}, errors={1: error, 2: 1.0}))
    assert choice.candidate == 2
    assert choice.skipped == (f"rank 1 differs by {error:.3g} times what rounding explains",)


def test_what_does_not_run_is_skipped_and_reported():
    choice = choose(FakeBench({0: 100, 1: 50, 2: 90}, refused=(1,)))
    assert (choice.candidate, choice.skipped) == (2, ("rank 1: does not run",))


def test_all_that_are_offered_are_asked_for_and_no_more():
    few, many = FakeBench({0: 100, 1: 100, 2: 100}), FakeBench({c: 100 for c in range(40)})
    assert choose(few).candidate == choose(many).candidate == 0
    assert few.asked == [1, 2, 3] and many.asked == list(range(1, MAX_CANDIDATES))


# ---- what is remembered ----------------------------------------------------------------------------------------------


def test_what_is_known_is_not_measured_again(tmp_path):
    path, measured, lines = tmp_path / "table.json", [], []

    def measure(problem):
        measured.append(problem)
        return Choice(len(measured), 20.0, 10.0)

    def run(problems, **settings):
        return tune_problems(problems, HERE, path, measure, report=lines.append, **settings)

    run(PROBLEMS[:1])
    table = run(PROBLEMS)
    assert measured == PROBLEMS and table == GemmTable.load(path)
    assert [table.candidate(problem) for problem in PROBLEMS] == [1, 2]
    assert len(lines) == 3 and "100.0%" in lines[-1]  # known ones are shown, too
    table = run(PROBLEMS[:1], again=True)
    assert measured == [*PROBLEMS, PROBLEMS[0]] and table == GemmTable.load(path)
    assert [table.candidate(problem) for problem in PROBLEMS] == [3, 2]


def test_what_was_measured_before_a_failure_is_kept(tmp_path):
    def measure(problem):
        if problem == PROBLEMS[1]:
            raise Refused("out of memory")
        return Choice(0, 20.0, 20.0)

    with pytest.raises(Refused):
        tune_problems(PROBLEMS, HERE, tmp_path / "table.json", measure)
    assert [problem for problem, _ in GemmTable.load(tmp_path / "table.json").choices] == PROBLEMS[:1]


def test_a_file_that_cannot_be_used_stops_before_anything_is_measured(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="move it away and tune again"):
        tune_problems(PROBLEMS, HERE, path, measure=pytest.fail)
    GemmTable("NVIDIA H100", "13.1.0").save(other := tmp_path / "other.json")
    with pytest.raises(ValueError, match="use another file"):
        tune_problems(PROBLEMS, HERE, other, measure=pytest.fail)


# ---- which GEMMs -----------------------------------------------------------------------------------------------------


def dense_step(microbatches):
    """A layer (64, 32) whose step sees 32 rows, in microbatches."""
    recipe, tx = fp8.DelayedScaling(amax_history_len=4), fp8.fused_adam(1e-3)
    layer, x = fp8.Dense(32, recipe=recipe), jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)

    def create(x):
        return fp8.TrainState.create(variables=layer.init(jax.random.key(0), x), tx=tx)

    def loss_fn(variables, x):
        return jnp.mean(layer.apply(variables, x).astype(jnp.float32))

    return fp8.make_train_step(loss_fn, tx, recipe, microbatches), jax.eval_shape(create, x), x


def test_the_gemms_of_a_step(with_kernels):
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    step, state, x = dense_step(1)
    assert set(list_fp8_gemms(step, state, x)) == {
        GemmProblem(32, 32, 64, e4m3, e4m3, "bfloat16", True, False, "fast"),
        GemmProblem(32, 64, 32, e5m2, e4m3, "bfloat16", False, False, "split"),
        GemmProblem(64, 32, 32, e4m3, e5m2, "float32", False, False, "split"),
    }
    step, state, x = dense_step(2)
    accumulated = GemmProblem(64, 32, 16, e4m3, e5m2, "float32", False, True, "split")
    assert accumulated in list_fp8_gemms(step, state, x)


def test_the_gemms_of_a_step_by_tile(with_kernels):
    """Those of block scaling have problems of their own: weights and output gradients in squares."""
    e4m3 = "float8_e4m3fn"
    layer, x = fp8.Dense(32, recipe=fp8.BlockScaling()), jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    gradient = jax.grad(lambda variables, x: layer.apply(variables, x).astype(jnp.float32).sum(), argnums=(0, 1))
    assert set(list_fp8_gemms(gradient, variables, x)) == {
        GemmProblem(32, 32, 64, e4m3, e4m3, "bfloat16", True, False, "1d2d"),
        GemmProblem(32, 64, 32, e4m3, e4m3, "bfloat16", False, False, "1d2d"),
        GemmProblem(64, 32, 32, e4m3, e4m3, "float32", False, False, "1d2d"),
    }


def test_equal_gemms_are_listed_once_and_others_not_at_all(with_kernels):
    layer = fp8.Dense(64, use_bias=False, recipe=fp8.CurrentScaling())
    x = jax.ShapeDtypeStruct((32, 64), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    assert len(list_fp8_gemms(lambda v, x: layer.apply(v, layer.apply(v, x)) @ x.T, variables, x)) == 1
    assert list_fp8_gemms(lambda x: x @ x.T, x) == []


def test_tune_measures_on_one_device_whatever_the_mesh(with_kernels, monkeypatch, tmp_path):
    placed = []

    class OnOneDevice(FakeBench):
        def __init__(self, problem):
            super().__init__({0: 100, 1: 80})
            placed.append(len(jnp.zeros(3).sharding.device_set))

    monkeypatch.setattr(tune_module, "GemmBench", OnOneDevice)
    monkeypatch.setattr(tune_module, "this_gpu", lambda: (HERE.device, HERE.cublaslt))
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        x = jax.ShapeDtypeStruct((256, 64), jnp.float8_e4m3fn, sharding=jax.P("data"))
        w = jax.ShapeDtypeStruct((32, 64), jnp.float8_e4m3fn, sharding=jax.P())

        def product(x, w):
            return fp8.matmul(fp8.Fp8Array(x, jnp.float32(1)), fp8.Fp8Array(w, jnp.float32(1)))

        table = tune(product, x, w, path=tmp_path / "table.json")
    assert placed == [1]
    assert [(problem.m, choice.candidate) for problem, choice in table.choices] == [(256 // 8, 1)]
    with pytest.raises(ValueError, match="needs a function with FP8 matrix products, got one without"):
        tune(lambda x: x @ x.T, jnp.zeros((16, 16)), path=tmp_path / "table.json")


def test_tune_needs_a_gpu():
    with pytest.raises(ValueError, match="GEMMs are tuned on the GPU that will run them, got platform 'cpu'"):
        tune(*dense_step(1))
