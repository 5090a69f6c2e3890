"""Diagnostics of a step: it stays the step that it was, and what is planted is found and named."""

import functools
import json
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.core.formats import INPUT
from jax_fp8.core.state import map_gemms_with_path
from jax_fp8.train.diagnostics import ObservedGemm, _kernel_health

RECIPES = {"delayed": fp8.DelayedScaling(amax_history_len=4), "current": fp8.CurrentScaling(), "bf16": None}
RECIPES |= {"block": fp8.BlockScaling()}
TX = fp8.fused_adamw(1e-3, skip_nonfinite=True)
FEATURES = 32
LAYERS = ["first", "block/up", "block/down", "last"]


class Model(nn.Module):
    """Four GEMMs of three ops; `poison` multiplies the gradient that enters the MLP."""

    recipe: fp8.DelayedScaling | fp8.CurrentScaling | None

    @nn.compact
    def __call__(self, x, poison):
        x = fp8.Dense(FEATURES, recipe=self.recipe, name="first")(x)
        x = fp8.LayerNormMLP(2 * FEATURES, recipe=self.recipe, name="block")(x)
        x = times_in_backward(x, poison)
        return fp8.LayerNormDense(FEATURES, recipe=self.recipe, name="last")(x)


@jax.custom_vjp
def times_in_backward(x, factor):
    return x


times_in_backward.defvjp(lambda x, factor: (x, factor), lambda factor, dy: ((dy * factor).astype(dy.dtype), None))


@functools.cache
def batch_of(x=1.0, poison=1.0, target=1.0, rows=64):
    keys = jax.random.split(jax.random.key(3))
    given = {"x": x * jax.random.normal(keys[0], (rows, FEATURES), jnp.bfloat16)}
    given["target"] = target * jax.random.normal(keys[1], (rows, FEATURES))
    return given | {"poison": jnp.full(rows, poison, jnp.float32)}


@functools.cache
def step_of(recipe, microbatches=1):
    model = Model(RECIPES[recipe])

    def loss(variables, batch):
        y = model.apply(variables, batch["x"], jnp.max(batch["poison"]))
        return jnp.mean(jnp.square(y.astype(jnp.float32) - batch["target"]))

    return fp8.make_train_step(loss, TX, RECIPES[recipe], microbatches, warm_start=False)  # a program of its own


@functools.cache
def first_variables(recipe) -> dict:
    return dict(jax.jit(Model(RECIPES[recipe]).init)(jax.random.key(1), batch_of()["x"], 1.0))


def state_of(recipe, steps=0, microbatches=1) -> fp8.TrainState:
    """A state of its own, for a step takes its buffers."""
    variables = jax.tree.map(jnp.copy, first_variables(recipe))
    state = fp8.TrainState.create(variables=variables, tx=TX)
    for _ in range(steps):
        state, _ = step_of(recipe, microbatches)(state, batch_of())
    return state


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def tensor(rows, layer, name) -> dict:
    (found,) = [row for row in rows["tensors"] if (row["layer"], row["tensor"]) == (layer, name)]
    return found


DELAYED_TWICE = pytest.param("delayed", 2, marks=pytest.mark.versions)
SLOW = [pytest.param(*of, marks=pytest.mark.slow) for of in (("delayed", 1), ("current", 2))]


@pytest.mark.parametrize(("recipe", "microbatches"), [DELAYED_TWICE, ("block", 2), ("bf16", 1), *SLOW])
def test_a_diagnosed_step_is_the_same_step(recipe, microbatches):
    step, batch = step_of(recipe, microbatches), batch_of()
    plain, diagnosed = state_of(recipe), state_of(recipe)
    for _ in range(2):
        plain, metrics = step(plain, batch)
        diagnosed, with_rows = step(diagnosed, batch, diagnose=True)
        rows = with_rows.pop("diagnostics").rows()
        assert bits((plain, metrics)) == bits((diagnosed, with_rows))
    assert json.loads(json.dumps(rows)) == rows
    assert [row["layer"] for row in rows["tensors"]] == [name for name in LAYERS for _ in range(3) if recipe != "bf16"]
    for row in rows["tensors"]:
        assert 0.015 < row["error"] < 0.08, row
        assert row["nonfinite"] == 0 and row["amax"] > 0
    assert [row["layer"] for row in rows["gradients"]] == [
        "block/down", "block/norm", "block/up", "first", "last", "last/norm"
    ]  # fmt: skip
    assert all(row["norm"] > 0 and row["nonfinite"] == 0 for row in rows["gradients"])
    assert fp8.find_fault(rows) is None
    before = bits(diagnosed)
    again = step.diagnose(diagnosed, batch).rows()
    assert bits(diagnosed) == before
    assert [row["layer"] for row in again["tensors"]] == [row["layer"] for row in rows["tensors"]]


@pytest.mark.parametrize(
    ("recipe", "fault", "found"),
    [
        ("delayed", {"x": 1000.0}, r"% of the input of first is larger than its scale allows"),
        ("delayed", {"poison": 1e5}, r"% of the output gradient of block/down is larger than its scale allows"),
        ("delayed", {"poison": math.nan}, r"100 % of the output gradient of block/down is not finite"),
        ("current", {"poison": math.nan}, r"100 % of the output gradient of block/down is not finite"),
        ("block", {"poison": math.nan}, r"100 % of the output gradient of block/down is not finite"),
        ("block", {"x": 1000.0, "poison": 1e5}, None),
        ("bf16", {"poison": math.nan}, r"the gradients of block/down are not finite, nor those of 3 other layers"),
        ("current", {"x": 1000.0, "poison": 1e5}, None),  # whose scales follow at once
        ("delayed", {}, None),
    ],
)
def test_a_planted_fault_is_named(recipe, fault, found):
    state = state_of(recipe, steps=2)
    clause = fp8.find_fault(step_of(recipe).diagnose(state, batch_of(**fault)).rows())
    assert clause is None if found is None else clause is not None and clause.endswith(found.lstrip("% "))


def test_a_scale_that_stands_still_shows_in_headroom_and_saturation():
    state = state_of("delayed", steps=2)

    def freeze(path, gemm):
        return {**gemm, "scale": gemm["scale"].at[INPUT].multiply(1 / 64)} if path == ("last",) else gemm

    healthy = step_of("delayed").diagnose(state, batch_of()).rows()
    frozen = step_of("delayed").diagnose(state.replace(fp8=map_gemms_with_path(freeze, state.fp8)), batch_of()).rows()
    at = tensor(frozen, "last", "input")
    assert at["headroom"] == pytest.approx(tensor(healthy, "last", "input")["headroom"] / 64, rel=1e-5)
    assert at["saturated"] > 0.5 and at["error"] > 0.5
    assert "input of last" in (fp8.find_fault(frozen) or "")
    assert tensor(frozen, "block/up", "input") == tensor(healthy, "block/up", "input")


def test_an_outlier_shows_as_underflow_and_error():
    batch = batch_of()
    with_outlier = batch | {"x": batch["x"].at[0, 0].set(1e5)}
    healthy, found, by_tile = (
        tensor(step_of(recipe).diagnose(state_of(recipe), given).rows(), "first", "input")
        for recipe, given in (("current", batch), ("current", with_outlier), ("block", with_outlier))
    )
    assert found["underflowed"] > 0.1 > 0.001 > healthy["underflowed"]
    assert found["saturated"] == healthy["saturated"] == 0
    # By tile it costs the other elements of its row at most, 31 of 64 x 32.
    assert 0 < by_tile["underflowed"] < 31 / 2048 and 1 <= by_tile["headroom"] < 2


def test_a_kernel_by_tile_of_which_devices_have_parts():
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Explicit,))
    kernel = jax.random.normal(jax.random.key(0), (192, 128))  # of which each device has a square that is cut
    split = jax.device_put(kernel, jax.NamedSharding(mesh, jax.P("fsdp")))
    gemm = ObservedGemm(("dense",), RECIPES["block"])
    one, other = (
        jax.jit(lambda kernel: _kernel_health(gemm, {"dense": {"kernel": kernel}}, {}))(array)
        for array in (kernel, split)
    )
    np.testing.assert_allclose(one, other, rtol=1e-6)
    assert one[0] > 3 and 0.02 < one[-1] < 0.03


def test_numbers_are_the_worst_of_the_microbatches():
    batch = batch_of()
    batch |= {"x": batch["x"].at[1::2].multiply(1.7)}
    rows = [step_of("current").diagnose(state_of("current"), half).rows() for half in halves(batch)]
    whole = step_of("current", 2).diagnose(state_of("current"), batch).rows()
    for name in ("saturated", "underflowed", "error", "amax"):
        of_halves = [tensor(half, "first", "input")[name] for half in rows]
        assert tensor(whole, "first", "input")[name] == pytest.approx(max(of_halves), rel=1e-6)
    assert max(of_halves) > min(of_halves)


def halves(batch):
    return [jax.tree.map(lambda leaf, part=part: leaf[part::2], batch) for part in (0, 1)]


def test_norms_are_those_of_the_gradients():
    state, batch = state_of("bf16"), batch_of()
    model = Model(None)

    def loss(variables, batch):
        y = model.apply(variables, batch["x"], 1.0)
        return jnp.mean(jnp.square(y.astype(jnp.float32) - batch["target"]))

    _, grads, _ = jax.jit(fp8.value_and_grad(loss))(state.variables, batch)
    rows = {row["layer"]: row["norm"] for row in step_of("bf16").diagnose(state, batch).rows()["gradients"]}
    assert rows["first"] == pytest.approx(norm_of(grads["first"]), rel=1e-3)
    assert rows["block/norm"] == pytest.approx(norm_of(grads["block"]["norm"]), rel=1e-3)


def norm_of(tree) -> float:
    return math.sqrt(sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(tree)))


class Stack(nn.Module):
    """Layers stacked by `nn.scan`, the input of each larger than that of the one before."""

    recipe: fp8.DelayedScaling | fp8.CurrentScaling
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            recipe: fp8.DelayedScaling | fp8.CurrentScaling

            @nn.compact
            def __call__(self, x, _):
                return 4 * fp8.Dense(FEATURES, recipe=self.recipe, name="dense")(x), None

        body = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        scan = nn.scan(body, variable_axes={"params": 0, "fp8": 0}, split_rngs={"params": True}, length=3)
        return scan(self.recipe, name="layers")(x, None)[0]


@pytest.mark.parametrize(
    ("recipe", "remat"),
    [("delayed", False), pytest.param("delayed", True, marks=pytest.mark.versions), ("current", False)],
)
def test_stacked_layers_have_numbers_of_their_own(recipe, remat):
    model = Stack(RECIPES[recipe], remat)
    x = batch_of()["x"]
    state = fp8.TrainState.create(variables=jax.jit(model.init)(jax.random.key(0), x), tx=TX)

    def loss(variables, batch):
        return jnp.mean(jnp.square(model.apply(variables, batch).astype(jnp.float32)))

    step = fp8.make_train_step(loss, TX, RECIPES[recipe])
    state, metrics = step(state, x, diagnose=True)
    rows = metrics["diagnostics"].rows()
    names = [f"layers/dense[{number}]" for number in range(3)]
    assert [row["layer"] for row in rows["tensors"]] == [name for name in names for _ in range(3)]
    amaxes = [tensor(rows, name, "input")["amax"] for name in names]
    assert amaxes[2] > 2 * amaxes[1] > 4 * amaxes[0] > 0
    assert [row["layer"] for row in rows["gradients"]] == names
    assert len({row["norm"] for row in rows["gradients"]}) == 3
    assert all(0.015 < row["error"] < 0.08 for row in rows["tensors"])


def test_what_nobody_can_measure_is_none():
    class Batched(nn.Module):
        @nn.compact
        def __call__(self, x):
            over = nn.vmap(fp8.Dense, variable_axes={"params": None, "fp8": None}, split_rngs={"params": False})
            return over(FEATURES, recipe=RECIPES["delayed"], name="dense")(x.reshape(2, -1, FEATURES))

    x, model = batch_of()["x"], Batched()
    state = fp8.TrainState.create(variables=jax.jit(model.init)(jax.random.key(0), x), tx=TX)
    loss = lambda variables, batch: jnp.sum(jnp.square(model.apply(variables, batch).astype(jnp.float32)))  # noqa: E731
    rows = fp8.make_train_step(loss, TX, RECIPES["delayed"]).diagnose(state, x).rows()
    assert tensor(rows, "dense", "input")["error"] is None
    assert tensor(rows, "dense", "kernel")["error"] > 0.01
    assert fp8.find_fault(rows) is None


@pytest.mark.versions
def test_a_loss_above_the_limit_changes_nothing_but_the_step_count():
    step, state, batch = step_of("delayed"), state_of("delayed", steps=1), batch_of()
    before = bits((state.params, state.opt_state, state.fp8))
    state, metrics = step(state, batch, skip_above=1e-3)
    assert (int(metrics["skipped"]), float(metrics["skip_above"])) == (1, np.float32(1e-3))
    assert float(metrics["loss"]) > 1e-3
    assert bits((state.params, state.opt_state, state.fp8)) == before and int(state.step) == 2
    taken, metrics = step(state, batch, skip_above=math.inf)
    assert int(metrics["skipped"]) == 0 and bits(taken.params) != before
    plain, _ = step(state_of("delayed", steps=1), batch)
    assert bits((taken.params, taken.opt_state, taken.fp8)) == bits((plain.params, plain.opt_state, plain.fp8))


def test_nor_does_it_change_the_weights_in_fp8_that_a_state_carries():
    step, batch, recipe = step_of("delayed"), batch_of(), RECIPES["delayed"]
    variables = jax.tree.map(jnp.copy, first_variables("delayed"))
    variables["fp8_cache"] = fp8.cast_weights(variables, recipe)
    state, _ = step(fp8.TrainState.create(variables=variables, tx=TX), batch)
    before = bits(state.cache)
    state, metrics = step(state, batch, skip_above=1e-3)
    assert int(metrics["skipped"]) == 1 and bits(state.cache) == before
    state, _ = step(state, batch, skip_above=math.inf)
    assert bits(state.cache) != before


@pytest.mark.parametrize(
    "fault", [{"x": math.nan}, {"target": math.inf}, {"poison": math.nan}], ids=["NaN", "infinity", "gradient"]
)
def test_what_is_not_finite_is_skipped(fault):
    step, state = step_of("delayed"), state_of("delayed", steps=1)
    before = bits((state.params, state.opt_state, state.fp8))
    state, metrics = step(state, batch_of(**fault), skip_above=math.inf)
    assert int(metrics["skipped"]) == 1
    assert bits((state.params, state.opt_state, state.fp8)) == before


def test_wrong_arguments_are_refused():
    step, state, batch = step_of("delayed"), state_of("delayed"), batch_of()
    for limit in (math.nan, -math.inf, "4"):
        with pytest.raises(ValueError, match=r"skip_above must be a finite number or math.inf, got"):
            step(state, batch, skip_above=limit)
    with pytest.raises(ValueError, match="diagnose must be True or False, got 10"):
        step(state, batch, diagnose=10)


def test_what_layers_keep_changes_no_number():
    config = fp8.GPTConfig(vocab_size=128, max_seq_len=16, hidden_size=32, num_layers=1, num_heads=2)
    tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, 128)
    state, found = None, {}
    for remat in ("none", "full", "offload:1"):
        model = fp8.GPT(config, recipe=RECIPES["delayed"], remat=remat)
        step = fp8.make_train_step(fp8.next_token_loss(model), TX, model.recipe, warm_start=False)
        state = state or step.init_state(model.init, jax.random.key(0), tokens[:, :-1])
        found[remat] = step.diagnose(state, tokens).rows()
    assert found["none"] == found["full"] == found["offload:1"]
    assert found["none"]["tensors"][0]["error"] > 0
