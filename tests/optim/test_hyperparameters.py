"""The numbers of fused_adam: what makes no sense is refused, and what only a traced program knows is let through."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fp8 as fp8

pytestmark = pytest.mark.versions

PARAMS = {"w": jnp.ones((3,))}


@pytest.mark.parametrize("make", [fp8.fused_adam, fp8.fused_adamw])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"learning_rate": -1.0},
            "learning_rate must be a finite number that is not negative, got -1.0; pass a number",
        ),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number .*, got nan"),
        ({"learning_rate": np.float32(-1)}, r"learning_rate must be a finite number .*, got np.float32\(-1.0\)"),
        ({"learning_rate": np.asarray(-1.0)}, "learning_rate must be a finite number .*, got -1.0"),
        ({"learning_rate": "1e-3"}, "learning_rate must be a finite number .*, got '1e-3'; pass .* a schedule"),
        ({"learning_rate": None}, "learning_rate must be a finite number .*, got None"),
        ({"learning_rate": jnp.ones(3)}, r"learning_rate must be one number, got float32\[3\]"),
        ({"b1": 2.0}, "b1 must be a finite number from 0 to below 1, got 2.0"),
        ({"b1": 1.0}, "b1 must be a finite number from 0 to below 1, got 1.0"),
        ({"b1": (0.9, 0.95)}, r"b1 must be a finite number from 0 to below 1, got \(0.9, 0.95\)"),
        ({"b2": -0.1}, "b2 must be a finite number from 0 to below 1, got -0.1"),
        ({"b2": float("nan")}, "b2 must be a finite number from 0 to below 1, got nan"),
        ({"eps": 0.0}, "eps must be a finite number above 0, got 0.0; a weight without any gradient would be 0 / 0"),
        ({"eps": 1e-60}, "eps must be a finite number above 0, got 1e-60"),  # 0 in float32
        ({"eps": float("inf")}, "eps must be a finite number above 0, got inf"),
        ({"weight_decay": -0.1}, "weight_decay must be a finite number that is not negative, got -0.1"),
        ({"weight_decay": "0.1"}, "weight_decay must be a finite number .*, got '0.1'"),
        ({"max_grad_norm": -1}, "max_grad_norm must be a finite number above 0, got -1; None clips nothing"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a finite number above 0, got 0.0"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm must be a finite number above 0, got inf"),
        ({"skip_nonfinite": "no"}, "skip_nonfinite must be True or False, got 'no'"),
    ],
)
def test_what_no_training_could_mean(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**({"learning_rate": 1e-3} | settings))


def test_a_step_never_climbs():
    """With a norm of -1 it did: the factor of the gradients was negative."""
    with pytest.raises(ValueError, match="max_grad_norm"):
        fp8.fused_adamw(1e-2, max_grad_norm=-1.0)
    tx = fp8.fused_adamw(1e-2, max_grad_norm=1.0)
    updates, _ = tx.update({"w": jnp.full((3,), 5.0)}, tx.init(PARAMS), PARAMS)
    assert (np.asarray(updates["w"]) < 0).all()


@pytest.mark.parametrize("rate", [0, 0.0, np.float32(1e-3), np.asarray(1e-3), jnp.float32(1e-3), lambda count: 1e-3])
def test_numbers_that_pass(rate):
    fp8.fused_adam(rate, b1=0, b2=0.0, eps=np.float64(1e-8), weight_decay=1, max_grad_norm=2)


@pytest.mark.parametrize("jit", [False, True])
def test_injected_and_traced_numbers_are_not_looked_at(jit):
    tx = optax.inject_hyperparams(fp8.fused_adamw)(
        learning_rate=lambda count: 1e-2, b1=0.8, eps=1e-6, weight_decay=0.1, max_grad_norm=1.0
    )

    def step(rate):
        state = tx.init(PARAMS)
        updates, _ = tx.update(PARAMS, state, PARAMS)
        inner = fp8.fused_adamw(rate, max_grad_norm=rate)
        return updates, inner.update(PARAMS, inner.init(PARAMS), PARAMS)[0]

    for updates in (jax.jit(step) if jit else step)(jnp.float32(0.5)):
        assert np.isfinite(updates["w"]).all() and (np.asarray(updates["w"]) < 0).all()


@pytest.mark.parametrize(
    ("other", "arrived"),
    [
        (optax.adamw(1e-3).init(PARAMS), "a tuple"),
        (optax.scale_by_adam().init(PARAMS), "a ScaleByAdamState"),
        (None, "None"),
        (PARAMS, "a dict with 'w'"),
    ],
    ids=["chain", "adam", "none", "swapped"],
)
def test_another_optimizers_state(other, arrived):
    message = f"state must be the FusedAdamState of fused_adam, got {arrived}, that of another optimizer; make it with"
    with pytest.raises(ValueError, match=message):
        fp8.fused_adam(1e-3).update(PARAMS, other, PARAMS)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"in_place": True}, r"in_place must be an InPlace or None, got True; pass jax_fp8.InPlace\(\)"),
        ({"grad_scale": jnp.ones(3)}, r"grad_scale must be a scalar, got float32\[3\]; multiply the gradients by it"),
    ],
)
def test_extra_arguments(extra, message):
    tx = fp8.fused_adam(1e-3)
    with pytest.raises(ValueError, match=message):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, **extra)


@pytest.mark.parametrize("gradient", [None, fp8.Fp8Array(jnp.ones(3), jnp.ones(())), {"x": jnp.ones(3)}])
def test_a_gradient_is_one_array(gradient):
    tx = fp8.fused_adam(1e-3)
    with pytest.raises(ValueError, match=r"grads must have .*, but \['w'\] must be a SingleArray, got .*; pass the gr"):
        tx.update({"w": gradient}, tx.init(PARAMS), PARAMS)


def test_what_a_schedule_returns():
    tx = fp8.fused_adam(lambda count: jnp.ones(3))
    with pytest.raises(ValueError, match=r"the rate of a step must be one number, got float32\[3\]; return a scalar"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_params_that_are_no_arrays():
    with pytest.raises(ValueError, match=r"fused_adam needs params that are arrays, got a float; pass jnp.float32"):
        fp8.fused_adam(1e-3).init({"w": 1.0})


def test_a_mask_is_of_whole_params():
    with pytest.raises(ValueError, match=r"mask must have one bool for each param, got bool\[3\]; say of whole params"):
        tx = fp8.fused_adamw(1e-3, mask={"w": jnp.ones(3, bool)})
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    tx = fp8.fused_adamw(1e-3, mask={"w": jnp.asarray(True)})
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)


DEEP = {"layer_0": {"bias": jnp.ones(3), "kernel": jnp.ones((3, 3))}, "layer_1": {"kernel": jnp.ones((3, 3))}}


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (
            lambda tx, other: tx.update(other, tx.init(DEEP), DEEP),
            r"^grads must have the structure of params, but \['layer_0'\]\['bias'\] is missing; pass the gradients of",
        ),
        (
            lambda tx, other: tx.update(DEEP, tx.init(other), DEEP),
            r"^state.mu must have the structure of params, but \['layer_0'\]\['bias'\] is missing; pass the state",
        ),
        (
            lambda tx, other: fp8.apply_updates(DEEP, other),
            r"^updates must have the structure of params, but \['layer_0'\]\['bias'\] is missing; pass what update",
        ),
        (
            lambda tx, other: fp8.fused_adam(1e-3, master=other).init(DEEP),
            r"^master must have the structure of params, but \['layer_0'\]\['bias'\] is missing; make it",
        ),
        (
            lambda tx, other: fp8.fused_adam(1e-3, mask=other).update(DEEP, tx.init(DEEP), DEEP),
            r"^mask must have the structure of params, but \['layer_0'\]\['bias'\] is missing; make it",
        ),
    ],
    ids=["grads", "state", "updates", "master", "mask"],
)
def test_two_trees_differ_in_one_place(update, message):
    """Both were printed whole: of a GPT, thousands of characters."""
    other = DEEP | {"layer_0": {"kernel": DEEP["layer_0"]["kernel"]}}
    with pytest.raises(ValueError, match=message) as raised:
        update(fp8.fused_adam(1e-3), other)
    assert raised.value.__cause__ is None and "PyTreeDef" not in str(raised.value)
