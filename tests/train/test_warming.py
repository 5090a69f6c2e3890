"""Rows of the FP8 state that have no history are warmed before a step, whichever step it is, and no other row is."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import make_mesh

import jax_fp8 as fp8
from jax_fp8.core.state import cold_rows, known_rows
from jax_fp8.train import warming

pytestmark = pytest.mark.versions

RECIPE = fp8.DelayedScaling(amax_history_len=4)
FEATURES = 32
X = jax.random.normal(jax.random.key(0), (64, FEATURES))
BAD = X.at[0, 0].set(jnp.nan)
SMALL = 1e-8  # of a loss: with a scale of 1 every gradient is all zeros


class Layers(nn.Module):
    """A layer, one that runs where `runs` says so, and one that starts at zero."""

    recipe: fp8.DelayedScaling | None = RECIPE
    runs: bool | None = None
    ends_in_zeros: bool = False

    @nn.compact
    def __call__(self, x, runs=False):
        dense = {"features": FEATURES, "recipe": self.recipe}
        x = fp8.Dense(**dense, name="first")(x)
        if self.runs is not None:
            late = fp8.Dense(**dense, name="late")
            if self.is_initializing():
                late(x)
            x = nn.cond(runs, lambda late, x: late(x), lambda late, x: x, late, x)
        return fp8.Dense(**dense, name="last", kernel_init=zeros if self.ends_in_zeros else lecun)(x)


zeros, lecun = nn.initializers.zeros_init(), nn.initializers.lecun_normal()


def squares(module):
    def loss(variables, batch):
        y = module.apply(variables, batch["x"], batch.get("runs", False)).astype(jnp.float32)
        return SMALL * jnp.mean((y - batch["x"]) ** 2)

    return loss


ADAM = fp8.fused_adamw(1e-3, skip_nonfinite=True)


def make(module, tx=ADAM, loss=None, recipe=RECIPE, **options):
    variables = jax.jit(module.init)(jax.random.key(1), X)
    step = fp8.make_train_step(loss or squares(module), tx, recipe, **options)
    return step, fp8.TrainState.create(variables=variables, tx=tx)


def known(state):
    return {name: np.asarray(known_rows(gemm)).tolist() for name, gemm in state.fp8.items()}


def largest_gradients(module, state, batch):
    _, gradients, _ = jax.jit(fp8.value_and_grad(squares(module)))(state.variables, batch)
    return {name: float(jnp.max(jnp.abs(gradient["kernel"]))) for name, gradient in gradients.items()}


@pytest.mark.parametrize("mesh", [None, {"data": 2}], ids=str)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_first_step_that_was_skipped_leaves_nothing_and_the_next_one_warms(mesh, microbatches):
    options = {"microbatches": microbatches} | ({} if mesh is None else {"parallel": make_mesh(**mesh)})
    step, state = make(Layers(), **options)
    step_of_good, expected = make(Layers(), **options)
    expected, _ = step_of_good(step_of_good.place(expected, {"x": X}), {"x": X})
    state = step.place(state, {"x": X})
    before = jax.device_get((state.params, state.fp8, state.opt_state))
    state, _ = step(state, {"x": BAD})
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.params, state.fp8, state.opt_state)), before)
    state, _ = step(state, {"x": X})
    jax.tree.map(np.testing.assert_array_equal, state.fp8, expected.fp8)
    assert known(state) == dict.fromkeys(("first", "last"), [True] * 3)


@pytest.mark.parametrize("warm_start", [True, False])
def test_a_layer_that_first_runs_late_finds_scales(warm_start):
    """A gradient of 1e-8 and less is all zeros with a scale of 1."""
    module = Layers(runs=True)
    step, state = make(module, optax.sgd(0.0), warm_start=warm_start)
    for number in range(4):
        if number == 3:
            before = known(state)
        state, _ = step(state, {"x": X, "runs": jnp.bool_(number == 3)})
    assert before["late"] == [False] * 3 and before["first"] == [True] * 3
    history = np.asarray(state.fp8["late"]["amax_history"])
    assert (history[:2, -1] > 0).all()
    assert (history[2, -2] > 0) == warm_start  # of the warm pass, and behind it that of the step
    assert largest_gradients(module, state, {"x": X, "runs": jnp.bool_(True)})["late"] > 0


def test_gradients_that_were_zero_at_first_are_warmed_when_they_are_not():
    """A last layer of zeros lets no gradient through; after step 0 it is none of zeros any more."""
    module = Layers(ends_in_zeros=True)
    step, state = make(module)
    state, _ = step(state, {"x": X})
    assert known(state) == {"first": [True, True, False], "last": [True, False, True]}
    gradients = []
    for _ in range(2):
        warm = jax.jit(fp8.warm_start(squares(module), RECIPE))(state.variables, {"x": X})
        gradients.append(largest_gradients(module, state, {"x": X})["first"])
        gradients.append(largest_gradients(module, state.replace(fp8=warm), {"x": X})["first"])
        state, _ = step(state, {"x": X})
    assert gradients[0] == 0 and gradients[1] > 0 and gradients[2] > 0
    assert known(state) == dict.fromkeys(("first", "last"), [True] * 3)


def test_a_run_that_was_resumed_does_what_the_uninterrupted_one_does():
    module = Layers(runs=True)
    step, state = make(module)
    batches = [{"x": X * (1 + number), "runs": jnp.bool_(number >= 4)} for number in range(6)]
    batches[0]["x"] = BAD
    states = []
    for batch in batches:
        states.append(jax.device_get(state))
        state, metrics = step(state, batch)
    for start in (1, 3, 4, 5):
        again, resumed = make(module)
        resumed = jax.tree.map(jnp.asarray, states[start])
        for batch in batches[start:]:
            resumed, found = again(resumed, batch)
        jax.tree.map(np.testing.assert_array_equal, resumed, state)
        assert found["loss"] == metrics["loss"]


class Counted:
    """How often the host reads a state."""

    def __init__(self, monkeypatch):
        self.reads = 0
        monkeypatch.setattr(warming, "on_host", self.read)

    def read(self, fp8_state):
        self.reads += 1
        return jax.device_get(fp8_state)


def test_the_host_reads_a_state_that_it_does_not_know_and_while_rows_are_cold(monkeypatch):
    step, state = make(Layers(runs=True))
    counted, found = Counted(monkeypatch), []
    for number in range(6):
        state, _ = step(state, {"x": X, "runs": jnp.bool_(number >= 2)})
        found.append(counted.reads)
    assert found == [1, 2, 3, 3, 3, 3]
    for changed in (state.replace(step=state.step + 1), state.replace(fp8=jax.tree.map(jnp.copy, state.fp8))):
        reads = counted.reads
        state, _ = step(jax.tree.map(jnp.copy, changed), {"x": X, "runs": jnp.bool_(True)})
        assert counted.reads == reads + 1


def stopped(module):
    """Of which `first` has no backward, and `late` is in the state alone."""

    def loss(variables, batch):
        def first_is_fixed(path, leaf):
            return jax.lax.stop_gradient(leaf) if path[0].key == "first" else leaf

        params = jax.tree_util.tree_map_with_path(first_is_fixed, variables["params"])
        y = module.apply({**variables, "params": params}, batch["x"]).astype(jnp.float32)
        return jnp.mean((y - batch["x"]) ** 2)

    return loss


def test_rows_that_this_loss_never_stages_are_not_waited_for():
    module = Layers(runs=False)
    variables = module.init(jax.random.key(1), X)
    without = Layers()
    step = fp8.make_train_step(stopped(without), optax.sgd(0.0), RECIPE)
    state = fp8.TrainState.create(variables=variables, tx=optax.sgd(0.0))
    for _ in range(2):
        state, _ = step(state, {"x": X})
    assert known(state) == {"first": [True, True, False], "last": [True] * 3, "late": [False] * 3}
    assert step._warm_up._is_warm
    again = fp8.make_train_step(stopped(without), optax.sgd(0.0), RECIPE)
    again(state, {"x": X})
    assert again._warm._cache_size() == 0  # a run that goes on compiles no warm pass for them


def test_a_row_that_stays_cold_is_named_once(monkeypatch):
    monkeypatch.setattr(warming, "PATIENCE", 3)
    step, state = make(Layers(runs=True))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(warming.PATIENCE - 1):
            state, _ = step(state, {"x": X})
        state, _ = step(state, {"x": BAD})  # which says nothing of the row
        assert not found
        for _ in range(3):
            state, _ = step(state, {"x": X})
    (said,) = [str(warning.message) for warning in found]
    assert "late (input and kernel and output gradient); pass warm_start=False" in said
    assert "first" not in said


def test_known_scales_stay_with_a_history_of_one_slot():
    """It is empty after every step: there a scale tells."""
    recipe = fp8.DelayedScaling(amax_history_len=1)
    step, state = make(Layers(recipe), optax.sgd(0.0), loss=squares(Layers(recipe)), recipe=recipe)
    state, _ = step(state, {"x": X})
    assert not cold_rows(state.fp8).any()
    scales = jax.device_get(state.fp8)
    state = step.warm_start(state, {"x": 1e-6 * X})
    jax.tree.map(np.testing.assert_array_equal, state.fp8, scales)
    step, fresh = make(Layers(recipe), optax.sgd(0.0), loss=squares(Layers(recipe)), recipe=recipe)
    warmed = step.warm_start(fresh, {"x": X})  # the control: of what is not known, all are found
    assert (np.asarray(warmed.fp8["first"]["scale"])[[0, 2]] != 1).all()
