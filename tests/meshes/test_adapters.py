"""Adapters and frozen kernels on a mesh: the loss and the adapters of one device, whatever the mesh splits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8

CONFIG = fp8.GPTConfig.preset("tiny-llama", num_layers=2, hidden_size=64, mlp_hidden_size=96, num_heads=4)
TOKENS = np.random.default_rng(0).integers(0, 256, (8, 33)).astype(np.int32)
LORA = fp8.Lora(rank=4, alpha=8)


def trained(recipe, is_frozen, axes, microbatches=1, steps=3, config=CONFIG, apart=None, whole=0, **options):
    """The losses of some steps, and the adapters after them. Kernels are frozen apart where `tensor` splits them."""
    model = fp8.GPT(config, recipe=recipe, lora=LORA)
    apart = "tensor" in (axes or {}) if apart is None else apart
    tx = fp8.freeze(fp8.fused_adamw(1e-2), trained="lora_")
    parallel = None
    if axes:
        parallel = fp8.Parallelism(jax.make_mesh(tuple(axes.values()), tuple(axes)), **options)
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, recipe, microbatches, parallel=parallel)

    def init(key, tokens):
        variables = model.init(key, tokens)
        if not is_frozen:
            return variables
        return fp8.freeze_kernels(variables, recipe, forward=lambda v: model.apply(v, tokens), apart=apart)

    state = step.init_state(init, jax.random.key(0), TOKENS[:, :-1])
    losses = []
    for _ in range(steps):
        state, metrics = step(state, TOKENS)
        losses.append(float(metrics["loss"]))
    if is_frozen and "tensor" in (axes or {}):
        frozen = jax.tree.leaves(state.collections["fp8_frozen"])
        split = [leaf for leaf in frozen if leaf.ndim and not leaf.sharding.is_fully_replicated]
        assert len(split) >= (7 - whole) * config.num_layers, "each device has a part of every kernel"
        assert all(leaf.addressable_shards[0].data.size * axes["tensor"] == leaf.size for leaf in split)
    flat = jax.tree_util.tree_leaves_with_path(state.params)
    return losses, {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat if "lora_" in path[-1].key}


def assert_alike(found, wanted):
    losses, adapters = found
    np.testing.assert_allclose(losses, wanted[0], rtol=2e-3)
    assert losses[-1] < losses[0] - 0.02
    for name, expected in wanted[1].items():
        assert np.linalg.norm(expected) > 0, name
        # Adam divides by the size of a gradient, so a tiny gradient of another sign moves an element the other way.
        assert np.linalg.norm(adapters[name] - expected) < 0.25 * np.linalg.norm(expected), name


@pytest.mark.parametrize("recipe", [fp8.DelayedScaling(), fp8.CurrentScaling()], ids=["delayed", "current"])
@pytest.mark.parametrize("axes", [{"data": 2}, {"fsdp": 2}, {"data": 2, "fsdp": 2}], ids=str)
def test_frozen_kernels(axes, recipe):
    assert_alike(trained(recipe, True, axes, 2), trained(recipe, True, None, 2))


@pytest.mark.parametrize("recipe", [None, fp8.DelayedScaling()], ids=["bf16", "delayed"])
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_kernels_that_are_params_may_be_split_over_tensor(axes, recipe):
    assert_alike(trained(recipe, False, axes), trained(recipe, False, None))


RECIPES = {"delayed": fp8.DelayedScaling(), "current": fp8.CurrentScaling(), "block": fp8.BlockScaling()}
# Each device of `tensor` must have whole tiles of 128 x 128.
WIDE = fp8.GPTConfig.preset("tiny-llama", num_layers=2, hidden_size=512, mlp_hidden_size=512, num_heads=4)


@pytest.mark.parametrize(
    ("recipe", "axes", "microbatches"),
    [
        ("delayed", {"tensor": 2}, 2),
        ("current", {"tensor": 2}, 1),
        ("delayed", {"data": 2, "tensor": 2}, 1),
        ("current", {"fsdp": 2, "tensor": 2}, 2),
        ("block", {"fsdp": 2, "tensor": 2}, 1),
    ],
    ids=str,
)
def test_frozen_kernels_are_split_over_tensor(recipe, axes, microbatches):
    config = WIDE if recipe == "block" else CONFIG
    wanted = trained(RECIPES[recipe], True, None, microbatches, config=config)
    assert_alike(trained(RECIPES[recipe], True, axes, microbatches, config=config), wanted)


def test_more_devices_than_heads_of_keys():
    """Each device of `tensor` then has all keys and values, in FP8 too."""
    config = fp8.GPTConfig.preset(
        "tiny-llama", num_layers=2, hidden_size=64, mlp_hidden_size=96, num_heads=4, num_kv_heads=1
    )
    assert config.num_kv_heads == 1
    found = trained(RECIPES["current"], True, {"tensor": 2}, config=config, whole=2)
    assert_alike(found, trained(RECIPES["current"], True, None, config=config))


def test_frozen_kernels_side_by_side_are_not_split_over_tensor():
    with pytest.raises(ValueError, match=r"frozen kernels of query, key, value must be apart"):
        trained(fp8.DelayedScaling(), True, {"tensor": 2}, steps=1, apart=False)


def test_a_tile_is_not_split_over_tensor():
    narrow = dataclasses.replace(WIDE, hidden_size=384, num_heads=6, num_kv_heads=6)
    with pytest.raises(ValueError, match="whole tiles of 128 of a frozen kernel, got 384"):
        trained(RECIPES["block"], True, {"tensor": 2}, steps=1, config=narrow)


@pytest.mark.parametrize("recipe", [None, fp8.DelayedScaling()], ids=["bf16", "delayed"])
def test_sequence_parallel(recipe):
    found = trained(recipe, recipe is not None, {"tensor": 2}, sequence_parallel=True)
    assert_alike(found, trained(recipe, recipe is not None, None))


def test_a_gradient_that_is_not_summed_is_found():
    """The check above sees adapters that differ as much as those of half of the batch."""
    wanted = trained(None, False, None)
    other = trained(None, False, None, steps=2)
    with pytest.raises(AssertionError):
        assert_alike((wanted[0], other[1]), wanted)
    assert jnp.all(jnp.isfinite(jnp.array(wanted[0])))
