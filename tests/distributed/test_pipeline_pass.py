"""Amaxes that a pass over the stages of a pipeline finds, weights that it casts once, and the dtype of gradients."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax.core import freeze
from hybrid import SHOWING, make_mesh, train
from pipelines import DELAYED, assert_is_same_step, dense, layers, loss_of, rows, variables_of
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.distributed.mesh_pass import MeshPass

PARTS = layers(DELAYED)
BATCH = rows()


def state_of(parts) -> fp8.TrainState:
    return fp8.TrainState.create(variables=variables_of(parts), tx=SHOWING)


def make(**options):
    parallel = fp8.Parallelism(make_mesh(pipe=2), **options)
    return fp8.make_train_step(loss_of(PARTS), SHOWING, DELAYED, 4, parallel=parallel)


def test_state_behind_the_layers_moves_as_without_pipe():
    parts = PARTS | {"last": dense(DELAYED)}
    state = state_of(parts)
    (ours, losses), (wanted, own_losses) = (
        train(loss_of(parts), state, BATCH, DELAYED, axes=axes, microbatches=4, warm_start=False)
        for axes in ({"pipe": 2}, None)
    )
    assert_is_same_step(ours[0], losses[0], wanted[0], own_losses[0])
    with pytest.raises(AssertionError, match="elements differ"):
        jax.tree.map(assert_same_bits, ours[0].fp8["last"], jax.tree.map(jax.device_get, state.fp8["last"]))


def test_containers_of_params_are_kept():
    variables = variables_of(PARTS)
    state = fp8.TrainState.create(variables=variables | {"params": freeze(variables["params"])}, tx=SHOWING)
    after, _ = jax.eval_shape(make(), state, BATCH)
    assert jax.tree.structure(after) == jax.tree.structure(state) != jax.tree.structure(state_of(PARTS))


def test_weights_that_no_stage_has_a_part_of_are_cast_once_too():
    parts = layers(DELAYED, 3)  # of 32 rows and columns
    parallel = fp8.Parallelism(make_mesh(pipe=3))
    mesh_pass = MeshPass.from_state(parallel, loss_of(parts), DELAYED, True, state_of(parts), BATCH, 4)
    assert not mesh_pass.placement.splits_params
    assert sorted(mesh_pass.pipeline.in_fp8) == [(name, gemm) for name in parts for gemm in ("down", "up")]


def exchanged(**options) -> Counter:
    """How often each dtype goes from stage to stage in an all-to-all."""
    lines = str(make(**options).trace(state_of(PARTS), BATCH).jaxpr).splitlines()
    return Counter(line.split(":")[1].split("[")[0] for line in lines if " all_to_all[" in line)


def test_gradients_go_back_in_the_dtype_that_is_asked_for():
    """Weights go in FP8, gradients of two kernels in float32 or bfloat16; vectors are summed, and not exchanged."""
    assert exchanged() == {"f8_e4m3fn": 2, "f32": 2}
    assert exchanged(gradient_dtype=jnp.bfloat16) == {"f8_e4m3fn": 2, "bf16": 2}
