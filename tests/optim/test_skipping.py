"""A step that is not taken leaves params and optimizer state to the bit, whatever the optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fp8 as fp8
from jax_fp8.optim.skipping import choose_step

PARAMS = {"a": jnp.linspace(-1, 1, 48).reshape(16, 3), "b": jnp.ones(16, jnp.bfloat16)}
GRADIENTS = jax.tree.map(lambda p: jnp.cos(p) / 3, PARAMS)
ADAM = fp8.fused_adamw(0.1, mu_dtype=jnp.bfloat16)
OPTIMIZERS = {
    "fused": ADAM,
    "after a clip": optax.chain(optax.clip_by_global_norm(0.1), ADAM),
    "injected": optax.inject_hyperparams(fp8.fused_adamw)(learning_rate=optax.linear_schedule(0.1, 0.2, 3)),
    "optax": optax.adamw(0.1),
    "behind a trace": optax.chain(optax.trace(0.9), ADAM),
    "of one leaf": optax.multi_transform({"ours": ADAM, "other": optax.sgd(0.1, 0.9)}, {"a": "ours", "b": "other"}),
}


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_changes_where_it_says_so(name, in_place):
    tx = optax.with_extra_args_support(OPTIMIZERS[name])

    @jax.jit
    def step(apply, params, state):
        request = {"in_place": fp8.InPlace(apply=apply)} if in_place else {}
        updates, new = tx.update(GRADIENTS, state, params, **request)
        return choose_step(apply, updates, (fp8.apply_updates(params, updates), new), (params, state))

    before = PARAMS, tx.init(PARAMS)
    for _ in range(2):  # so that the second step has moments to lose
        taken = step(True, *before)
        skipped = step(False, *before)
        jax.tree.map(np.testing.assert_array_equal, skipped, before)
        changed = [not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (taken, before)), strict=True)]
        assert sum(changed) >= 4
        before = taken


def test_a_step_that_is_taken_is_the_one_that_nobody_asked_about():
    def step(request):
        updates, new = ADAM.update(GRADIENTS, ADAM.init(PARAMS), PARAMS, in_place=request)
        return fp8.apply_updates(PARAMS, updates), new

    plain, asked = jax.jit(lambda: step(fp8.InPlace()))(), jax.jit(lambda: step(fp8.InPlace(apply=jnp.bool_(True))))()
    jax.tree.map(np.testing.assert_array_equal, plain, asked)
