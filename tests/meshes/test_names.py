"""A step on a mesh of a model whose params carry the names of their dims: placed by these, and else as without."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import gpt, make_mesh, run, tokens
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8

RECIPE, INPUTS = fp8.DelayedScaling(amax_history_len=2), (jax.random.key(0), tokens()[:, :-1])
PLAIN = gpt(RECIPE, num_layers=1)
NAMED = PLAIN.clone(logical_axes=True)
NAMES = [
    ("embed", "fsdp"), ("positions", "fsdp"), ("kv_heads", "tensor"),
    *((name, axes) for name in ("heads", "mlp", "vocab") for axes in (("tensor", "fsdp"), "tensor")),
]  # fmt: skip
USUAL = [("embed", "fsdp"), ("residual", "fsdp"), *((name, "tensor") for name in ("heads", "kv_heads", "mlp", "vocab"))]


def first_steps(model, rules=()):
    step = fp8.make_train_step(
        fp8.next_token_loss(model), optax.sgd(0.1), RECIPE,
        parallel=fp8.Parallelism(make_mesh(fsdp=2, tensor=2), rules), warm_start=False,
    )  # fmt: skip
    state = step.init_state(model.init, *INPUTS)
    where = state.params["layer_0"]["mlp"]["down"]["kernel"].sharding.spec
    return where, run(step, state, tokens(), steps=2)[1]


def test_losses_of_params_that_are_placed_by_names():
    """With names that say the default they are the same to the bit; placed otherwise they differ by rounding."""
    shapes = jax.eval_shape(NAMED.init, *INPUTS)
    where, losses = first_steps(PLAIN)
    assert first_steps(NAMED, fp8.rules_from_names(shapes, NAMES)) == (where, losses)
    usual, own_losses = first_steps(NAMED, fp8.rules_from_names(shapes, USUAL))
    assert (where, usual) == (P(("tensor", "fsdp")), P("tensor", "fsdp"))
    np.testing.assert_allclose(own_losses, losses, 1e-3)
    assert losses[1] < losses[0] - 0.05


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_step_without_a_mesh_takes_names_off(microbatches):
    """Also the weight cache, Adam's moments and microbatches know params by their paths."""
    found = []
    for model in (PLAIN, NAMED):
        variables = jax.jit(model.init)(*INPUTS)
        cache = fp8.cast_weights(variables, RECIPE)
        tx = fp8.fused_adam(1e-2)
        state = fp8.TrainState.create(variables={**variables, "fp8_cache": cache}, tx=tx)
        step = fp8.make_train_step(fp8.next_token_loss(model), tx, RECIPE, microbatches, warm_start=False)
        found.append(run(step, state, tokens(), steps=2))
    (plain, losses), (named, own_losses) = found
    assert own_losses == losses and jax.tree.structure(named[1]) == jax.tree.structure(plain[1])


def test_params_of_ones_own_jit():
    """Flax maps names to shardings; the state and the step follow."""
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    names = nn.get_partition_spec(jax.eval_shape(NAMED.init, *INPUTS))
    shardings = nn.logical_to_mesh_sharding(names, mesh, [("embed", "fsdp"), ("vocab", "fsdp")])
    variables = jax.jit(lambda *inputs: nn.unbox(NAMED.init(*inputs)), out_shardings=shardings)(*INPUTS)
    assert variables["params"]["layer_0"]["mlp"]["up"]["kernel"].sharding.spec == P("fsdp", None)
    of_one = jax.jit(fp8.next_token_loss(PLAIN))(jax.jit(PLAIN.init)(*INPUTS), tokens())
    np.testing.assert_allclose(jax.jit(fp8.next_token_loss(NAMED))(variables, jnp.asarray(tokens())), of_one, 1e-4)
