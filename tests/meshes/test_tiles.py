"""A GPT with scales by tile on a mesh: the step of one device, but for tiles that end where a device's tokens do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import SHOWING, assert_close, first_state, gpt, gradients_of, make_mesh, significant, spread, tokens, train

import jax_fp8 as fp8

BLOCK, MICROBATCHES = fp8.BlockScaling(), 2
# The mesh, and how close gradients are: 2e-4 where sums are in another order, and tiles of tokens others; over `tensor`
# what is summed is rounded before.
WAYS = {"data, fsdp": ({"data": 2, "fsdp": 2}, 1e-3), "tensor": ({"tensor": 2}, 0.25), "pipe": ({"pipe": 2}, 1e-3)}


@functools.cache
def model_and_state(width=256, num_layers=2):
    """With two squares in the rows of a kernel, one for each device of `fsdp` or `pipe`."""
    model = gpt(BLOCK, hidden_size=width, num_layers=num_layers, head_recipe=BLOCK)
    return model, first_state(model.init, tokens()[:, :-1])


def first_step(width=256, num_layers=2, **axes):
    model, state = model_and_state(width, num_layers)
    options = {"microbatches": MICROBATCHES, "axes": axes or None}
    (after,), (loss,) = train(fp8.next_token_loss(model), state, tokens(), BLOCK, **options)
    return significant(gradients_of(after)), loss


on_one_device = functools.cache(first_step)


@pytest.mark.parametrize("name", WAYS)
def test_a_step_is_that_of_one_device(name):
    axes, tolerance = WAYS[name]
    gradients, loss = first_step(**axes)
    expected, of_one = on_one_device()
    np.testing.assert_allclose(loss, of_one, 1e-3 if "tensor" in axes else 2e-5)
    assert all(np.any(gradient) for gradient in expected.values())
    assert_close(gradients, expected, tolerance)


def test_kernels_go_over_the_wire_in_fp8_with_a_scale_for_each_square():
    model, state = model_and_state()
    step = fp8.make_train_step(fp8.next_token_loss(model), SHOWING, BLOCK, MICROBATCHES, parallel=make_mesh(fsdp=2))
    placed = step.place(jax.tree.map(jnp.copy, state), tokens())
    sent = {(one.shape, one.dtype) for one in fp8.explain(step, placed, tokens()).collectives if "gather" in one.name}
    up = 256, 1024
    assert {(up, "float8_e4m3fn"), ((2, 8), "float32")} <= sent and (up, "float32") not in sent


@pytest.mark.slow  # whether squares are cut: tests/parallel/test_transfers.py
def test_squares_that_fsdp_cuts_are_gathered_as_they_are():
    """Half a square on each device: layers cast the whole kernel, as on one device; and the user is told."""
    with pytest.warns(UserWarning, match=r"whole tiles of a kernel.*fsdp=2 cuts those of layer_0/attention/out, "):
        gradients, loss = first_step(128, 1, fsdp=2)
    expected, of_one = on_one_device(128, 1)
    np.testing.assert_allclose(loss, of_one, 2e-5)
    assert_close(gradients, expected, 1e-3)


def test_sequence_parallelism_is_refused_before_anything_is_traced():
    model, state = model_and_state()
    options = spread(make_mesh(tensor=2), sequence_parallel=True)
    refused = "sequence parallelism gathers activations in FP8, .* got BlockScaling"
    with pytest.raises(ValueError, match=refused):
        fp8.make_train_step(fp8.next_token_loss(model), SHOWING, BLOCK, **options)
    # Layers by tile, of which the step is not told.
    step = fp8.make_train_step(fp8.next_token_loss(model), SHOWING, fp8.CurrentScaling(), **options)
    with pytest.raises(ValueError, match=refused):
        step.place(state, tokens())
