"""Products whose state a foreign step carries, compiled for H200s: its launches, and that nothing is computed twice."""

import h200
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jax_fp8 as fp8

pytestmark = pytest.mark.skipif(bool(h200.missing_reason()), reason=h200.missing_reason() or "")

RECIPE = fp8.DelayedScaling()
LAYERS = 3


def compiled(by_state, recipe=RECIPE, policy=None):
    """Gradients of layers under `lax.scan`, as MaxText takes them."""

    def layer(x, of):
        kernel, state = of
        y = fp8.einsum("TD,DM->TM", x, kernel.astype(x.dtype), recipe=recipe, state=state)
        return jax.nn.silu(checkpoint_name(y, "product")), None

    def loss(kernels, states, x):
        y, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, (kernels, states))
        return jnp.mean(y.astype(jnp.float32) ** 2)

    kernels = jnp.zeros((LAYERS, 1024, 1024))
    states = jax.vmap(lambda kernel: fp8.init_state(recipe, kernel))(kernels)
    arguments = h200.shapes((kernels, states, jnp.zeros((2048, 1024), jnp.bfloat16)), h200.on_one_device())
    return h200.compile(jax.jit(jax.grad(loss, (0, 1) if by_state else 0)), *arguments)


def is_in_a_fusion(program, target):
    """Whether a custom call reads or writes slices of larger arrays, within one of XLA's fusions."""
    computation = program.hlo[: program.hlo.index(f'custom_call_target="{target}"')].rsplit("\n\n", 1)[-1]
    return "fusion" in computation.splitlines()[0]


def test_one_launch_moves_the_state_of_a_layer():
    program = compiled(by_state=True)
    calls = program.custom_calls
    assert calls["jax_fp8_update_state"] == 1  # in the loop of the backward
    assert not is_in_a_fusion(program, "jax_fp8_update_state")  # it must work in place; without barriers it is in one
    assert not any("amax" in target for target in calls)  # no tensor is read for its amax alone
    assert len(program.gemms_of("f8e4m3fn", "f8e5m2")) == 4  # fprop twice, for remat; dgrad and wgrad
    assert len(program.gemms) == 4


def test_a_result_that_is_kept_is_computed_once():
    """Without a barrier behind the product XLA would compute it twice in the forward, once for the array of all layers
    that keeps it; as it does with its own GEMMs.
    """
    program = compiled(by_state=True, policy=jax.checkpoint_policies.save_only_these_names("product"))
    assert len(program.gemms) == 3


def test_without_the_state_every_tensor_is_read_for_its_amax():
    """A control of the test above, and what the warning says."""
    with pytest.warns(UserWarning, match="not by its state"):
        from_own = compiled(by_state=False)
    current = compiled(by_state=False, recipe=fp8.CurrentScaling())
    assert from_own.custom_calls == current.custom_calls
    assert not from_own.custom_calls["jax_fp8_update_state"]
    assert any("amax" in target for target in from_own.custom_calls)
