"""What a tape puts beside GEMMs and reads again; and a planted measurement, which every way of taking gradients hands
over though nobody but this file knows it.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import make_mesh
from jax import lax
from nnx_layers import X, loss, make
from pipelines import CURRENT, DELAYED, dense, layers, loss_of, rows, variables_of
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.core.fp8_gemm import Fp8Gemm
from jax_fp8.core.paths import LayerPath, at_path
from jax_fp8.core.recorder import RECORDER
from jax_fp8.distributed.local_pass import LocalPass
from jax_fp8.distributed.mesh_pass import MeshPass
from jax_fp8.grads.delayed import delayed_gradients
from jax_fp8.grads.gradients import take_gradients
from jax_fp8.grads.tape import (
    GradientTape,
    Measurement,
    PassResult,
    Totals,
    add_share,
    added_by_gemms,
    nothing_measured,
    share_of,
)
from jax_fp8.nnx.gradients import _differentiated
from jax_fp8.parallel.mesh import Parallelism

NAME = "twice the amax of dy"
PARTS = layers(DELAYED) | {"last": dense(DELAYED)}
LOSS, VARIABLES, BATCH = loss_of(PARTS), variables_of(PARTS), rows()
IN_LAYERS = [(name, gemm) for name in LOSS.layers for gemm in ("down", "up")]
GEMMS = [("last",), *IN_LAYERS]


def observe(gemms) -> list[Measurement]:
    return [Measurement(gemm, NAME, (1,)) for gemm in gemms]


@pytest.fixture
def planted(monkeypatch):
    """The one line in the backward."""
    record_backward = Fp8Gemm.record_backward

    def and_measure(gemm, amaxes):
        gemm.record.measure(NAME, 2 * amaxes[2:])
        return record_backward(gemm, amaxes)

    monkeypatch.setattr(Fp8Gemm, "record_backward", and_measure)


def as_a_whole(gemms):
    return jax.jit(take_gradients(LOSS, observe=observe(gemms)))(VARIABLES, BATCH)


def over_microbatches(gemms):
    state, a_pass = fp8.TrainState.create(variables=VARIABLES, tx=optax.sgd(0.0)), LocalPass(DELAYED, 4, True, False)
    return jax.jit(lambda batch: a_pass.gradients(LOSS, lambda: state, batch, [], observe(gemms)))(BATCH)


def layer_by_layer(gemms):
    on_host = replace(LOSS, on_host=LOSS.layers[:1])
    return jax.jit(take_gradients(on_host, observe=observe(gemms)))(VARIABLES, BATCH)


def with_delayed_weight_gradients(gemms):
    return jax.jit(delayed_gradients(LOSS, observe=observe(gemms)))(VARIABLES, BATCH)[0]


def on_mesh(gemms, microbatches=1, **axes):
    schedule = axes.pop("schedule", None)
    state = fp8.TrainState.create(variables=VARIABLES, tx=optax.sgd(0.0))
    parallel, local = Parallelism(make_mesh(**axes), schedule=schedule), LocalPass(DELAYED, microbatches, True, False)
    mesh = MeshPass.from_state(parallel, LOSS, DELAYED, True, state, BATCH, microbatches)
    run = jax.jit(lambda state, batch: mesh.gradients(local.gradients, state, batch, observe(gemms)))
    return run(mesh.constrain(state), BATCH)


def on_devices(gemms):
    return on_mesh(gemms, data=2, fsdp=2)


def on_stages(gemms):
    return on_mesh(gemms, microbatches=4, pipe=2)


def on_stages_by_halves(gemms):
    return on_mesh(gemms, microbatches=4, pipe=2, schedule="zero-bubble")


def by_nnx(gemms):
    found: list[PassResult] = []
    run = _differentiated(loss, 0, False, False, lambda _, result: found.append(result), observe(gemms))
    run(make(), X)
    return found[0]


OF_NNX = [("0", "first"), ("0", "second")]  # of the first argument
WAYS: dict[Callable, list[LayerPath]] = {
    as_a_whole: GEMMS, over_microbatches: GEMMS, layer_by_layer: GEMMS, with_delayed_weight_gradients: GEMMS,
    on_devices: GEMMS, on_stages: IN_LAYERS, on_stages_by_halves: IN_LAYERS, by_nnx: OF_NNX,
}  # fmt: skip


def assert_is_found(way, gemms):
    """Of the GEMMs with state, in order, these were observed."""
    result, all_of_way = way(gemms), OF_NNX if way is by_nnx else sorted(GEMMS)
    wanted = [2 * result.amaxes[3 * all_of_way.index(gemm) + 2] for gemm in gemms]
    assert np.all(np.asarray(wanted) > 0)
    assert_same_bits(result.measured, np.float32(wanted))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_planted_measurement_is_found(planted, way):
    assert_is_found(way, WAYS[way])


def test_a_measurement_that_no_backward_writes_is_noticed():
    """Negative control."""
    with pytest.raises(AssertionError):
        assert_is_found(as_a_whole, GEMMS)


def in_one(transform) -> Callable:
    return lambda variables, batch: jnp.mean(transform(lambda x: LOSS(variables, x))(batch[None]))


@pytest.mark.parametrize("transform", [jax.vmap, lambda fn: lambda x: lax.cond(x[0, 0, 0] > 0, fn, fn, x[0])])
def test_what_a_way_cannot_carry_is_refused(planted, transform):
    loss = in_one(transform)
    assert jax.jit(take_gradients(loss))(VARIABLES, BATCH).amaxes.all()
    with pytest.raises(ValueError, match=f"cannot reach its Ref, got one that measures {NAME}; take the layer out"):
        jax.jit(take_gradients(loss, observe=observe(GEMMS)))(VARIABLES, BATCH)


def test_stages_refuse_what_is_measured_outside_of_layers(planted):
    with pytest.raises(ValueError, match=f"GEMMs in its layers, got {NAME} of last; do not ask for it, or leave out"):
        on_stages(GEMMS)


def test_a_measurement_of_a_layer_that_does_not_run_is_refused(planted):
    with pytest.raises(ValueError, match=f"in a layer that the loss runs, got {NAME} of layer_0/other; pass the path"):
        as_a_whole([*GEMMS, ("layer_0", "other")])


def test_what_need_not_be_there_is_zeros(planted):
    spared = [replace(of, is_needed=False) for of in observe([("layer_0", "up"), ("layer_0", "other")])]
    result = jax.jit(take_gradients(in_one(jax.vmap), observe=spared))(VARIABLES, BATCH)
    assert_same_bits(result.measured, nothing_measured(spared))


def test_stateless_gemms_are_observed_and_add_up(planted):
    """A GEMM without state has a recorder where there is something to record."""
    parts = layers(CURRENT)
    loss, variables = loss_of(parts), variables_of(parts)
    sums = jax.tree.map(lambda p: jnp.ones(p.shape), variables["params"])
    run = take_gradients(loss, observe=observe(IN_LAYERS), gemms=IN_LAYERS, sums=sums, weight=0.5)
    found, alone = jax.jit(run)(variables, BATCH), jax.jit(take_gradients(loss))(variables, BATCH)
    assert found.amaxes.size == 0 and np.all(found.measured > 0) and alone.measured.size == 0
    wanted = jax.tree.map(lambda total, gradient: add_share(total, 0.5, gradient), sums, alone.grads)
    jax.tree.map(lambda got, of: np.testing.assert_allclose(got, of, 1e-6), found.grads, wanted)
    assert set(GradientTape(variables, gemms=IN_LAYERS).variables) == {"params"}


def test_which_gradients_add_up_in_their_gemms():
    params = {"dense": {"kernel": jnp.ones((16, 16))}, "norm": {"scale": jnp.ones(3)}}
    params["other"] = {"kernel": jnp.ones((2, 3, 3)), "bias": jnp.ones(3)}
    stacked = {"scale": jnp.ones((2, 3)), "amax_history": jnp.zeros((2, 3, 4))}
    fp8_state = {"dense": jax.tree.map(lambda leaf: leaf[0], stacked), "other": stacked}
    assert added_by_gemms(fp8_state, params) == [("dense", "kernel")]
    assert added_by_gemms({}, params, [("dense",), ("other",)]) == [("dense", "kernel")]


def test_shares_are_float32():
    gradient = jnp.bfloat16([1.5])
    assert share_of(1 / 3, gradient).dtype == add_share(jnp.float32([1]), 1 / 3, gradient).dtype == jnp.float32
    assert_same_bits(
        add_share(jnp.float32([1]), 1 / 3, gradient), np.float32([1]) + np.float32(1 / 3) * np.float32(1.5)
    )


def test_a_stage_goes_on_from_what_it_has():
    nothing = jax.tree.map(jnp.zeros_like, VARIABLES["params"])
    totals = Totals.none(VARIABLES, observe(GEMMS), nothing, first=(1,))
    assert {amaxes.shape for amaxes in totals.amaxes.values()} == {(1, 3)}
    assert {measured.shape for measured in totals.measured.values()} == {(1, 1)}
    earlier = replace(totals, amaxes={gemm: amaxes + 7 for gemm, amaxes in totals.amaxes.items()})
    tape = GradientTape(VARIABLES, observe=observe(GEMMS), earlier=earlier)
    slots = [at_path(tape.variables["fp8"], gemm)[RECORDER].record.slot for gemm in GEMMS]
    assert [slot.shape for slot in slots] == [()] * len(GEMMS)  # with which no forward records
    jax.tree.map(assert_same_bits, tape.read_totals(nothing, tape.rows), earlier)
