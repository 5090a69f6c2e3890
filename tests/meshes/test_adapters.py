"""Adapters and frozen kernels on a mesh: the loss and the adapters of one device, whatever the mesh splits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8

CONFIG = fp8.GPTConfig.preset("tiny-llama", num_layers=2, hidden_size=64, mlp_hidden_size=96, num_heads=4)
TOKENS = np.random.default_rng(0).integers(0, 256, (8, 33)).astype(np.int32)
LORA = fp8.Lora(rank=4, alpha=8)


def trained(recipe, is_frozen, axes, microbatches=1, steps=3, **options):
    """The losses of some steps, and the adapters after them."""
    model = fp8.GPT(CONFIG, recipe=recipe, lora=LORA)
    tx = fp8.freeze(fp8.fused_adamw(1e-2), trained="lora_")
    parallel = None
    if axes:
        parallel = fp8.Parallelism(jax.make_mesh(tuple(axes.values()), tuple(axes)), **options)
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, recipe, microbatches, parallel=parallel)

    def init(key, tokens):
        variables = model.init(key, tokens)
        if not is_frozen:
            return variables
        return fp8.freeze_kernels(variables, recipe, forward=lambda v: model.apply(v, tokens))

    state = step.init_state(init, jax.random.key(0), TOKENS[:, :-1])
    losses = []
    for _ in range(steps):
        state, metrics = step(state, TOKENS)
        losses.append(float(metrics["loss"]))
    flat = jax.tree_util.tree_leaves_with_path(state.params)
    return losses, {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat if "lora_" in path[-1].key}


def assert_alike(found, wanted):
    losses, adapters = found
    np.testing.assert_allclose(losses, wanted[0], rtol=2e-3)
    assert losses[-1] < losses[0] - 0.02
    for name, expected in wanted[1].items():
        assert np.linalg.norm(expected) > 0, name
        # Adam divides by the size of a gradient, so a tiny gradient of another sign moves an element the other way.
        assert np.linalg.norm(adapters[name] - expected) < 0.2 * np.linalg.norm(expected), name


@pytest.mark.parametrize("recipe", [fp8.DelayedScaling(), fp8.CurrentScaling()], ids=["delayed", "current"])
@pytest.mark.parametrize("axes", [{"data": 2}, {"fsdp": 2}, {"data": 2, "fsdp": 2}], ids=str)
def test_frozen_kernels(axes, recipe):
    assert_alike(trained(recipe, True, axes, 2), trained(recipe, True, None, 2))


@pytest.mark.parametrize("recipe", [None, fp8.DelayedScaling()], ids=["bf16", "delayed"])
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_kernels_that_are_params_may_be_split_over_tensor(axes, recipe):
    assert_alike(trained(recipe, False, axes), trained(recipe, False, None))


def test_frozen_kernels_are_not_split_over_tensor():
    with pytest.raises(ValueError, match="frozen"):
        trained(fp8.DelayedScaling(), True, {"tensor": 2}, steps=1)


@pytest.mark.parametrize("recipe", [None], ids=["bf16"])
def test_sequence_parallel(recipe):
    found = trained(recipe, False, {"tensor": 2}, sequence_parallel=True)
    assert_alike(found, trained(recipe, False, None))


def test_a_gradient_that_is_not_summed_is_found():
    """The check above sees adapters that differ as much as those of half of the batch."""
    wanted = trained(None, False, None)
    other = trained(None, False, None, steps=2)
    with pytest.raises(AssertionError):
        assert_alike((wanted[0], other[1]), wanted)
    assert jnp.all(jnp.isfinite(jnp.array(wanted[0])))
