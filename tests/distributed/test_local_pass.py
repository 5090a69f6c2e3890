"""A pass over a batch as one device makes it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fp8 as fp8
from jax_fp8.distributed.local_pass import LocalPass
from jax_fp8.grads.loss_aux import AuxLoss

RECIPE = fp8.DelayedScaling(amax_history_len=2)
LAYER, X = fp8.Dense(16, recipe=RECIPE), np.asarray(jax.random.normal(jax.random.key(0), (64, 16)))
STATE = fp8.TrainState.create(variables=LAYER.init(jax.random.key(1), X), tx=optax.sgd(0.0))


def loss_fn(variables, x):
    return jnp.mean(jnp.square(LAYER.apply(variables, x).astype(jnp.float32) - x))


def gradients(microbatches, has_aux=False, x=X):
    loss = AuxLoss(lambda *given: (loss_fn(*given), {"rows": len(given[1])})) if has_aux else loss_fn
    a_pass = LocalPass(RECIPE, microbatches, True, has_aux)
    return jax.jit(lambda x: a_pass.gradients(loss, lambda: STATE, x, []))(x)


def test_a_pass_over_microbatches_has_the_mean_and_the_largest_amaxes():
    whole, parts = gradients(4), [gradients(1, x=X[part::4]) for part in range(4)]
    np.testing.assert_allclose(whole.loss, np.mean([part.loss for part in parts]), 1e-6)
    np.testing.assert_array_equal(whole.amaxes, np.max([part.amaxes for part in parts], axis=0))
    assert float(whole.loss) != float(parts[0].loss)  # negative control


@pytest.mark.parametrize("microbatches", [1, 4])
def test_aux_is_beside_the_loss_and_changes_no_bit_of_it(microbatches):
    found = gradients(microbatches, has_aux=True)
    assert int(found.aux.rest["rows"]) == 64 and found.aux.collections == {}
    jax.tree.map(np.testing.assert_array_equal, replace(found, aux=None), gradients(microbatches))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_first_amaxes_are_those_of_all_rows(microbatches):
    amaxes = LocalPass(RECIPE, microbatches, True, False).first_amaxes(loss_fn, lambda: STATE, X, [])
    np.testing.assert_array_equal(amaxes[0], np.abs(X.astype(jnp.bfloat16)).max())
