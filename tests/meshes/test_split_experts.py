"""Steps in which `tensor` splits each expert, with and without sequence parallelism, beside steps on one device.

Partial sums of `down` are rounded to bfloat16 before they are added up, and a value that falls on the other side of a
rounding to FP8 is as far off as any (tests/meshes/test_step.py). So the model in float32 is compared with one device.
In FP8 every mesh has the bits of `tensor` alone, and that is about as far from float32 as one device is.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from expert_steps import FIRST_SUMS, LOSS, RECIPES, assert_same_trees, model_of, on_one_device, state_of, trained
from hybrid import SEQ, SHOWING, assert_close, errors, gradients_of, make_mesh, significant, tokens
from jax import lax

import jax_fp8 as fp8
from jax_fp8.ops import expert_mlp, router

EXACT = 1e-5  # in float32; 5e-7 seen
FARTHER = 1.25  # from float32 than one device is; the mean over all gradients
WAYS = {
    "tensor 2": ({"tensor": 2}, {}),
    "sequence": ({"tensor": 2}, {"sequence_parallel": True}),
    "data 2": ({"data": 2, "tensor": 2}, {}),
    "expert 2": ({"expert": 2, "tensor": 2}, {}),
    "expert 2, sequence": ({"expert": 2, "tensor": 2}, {"sequence_parallel": True}),
    "fsdp 2, sequence": ({"fsdp": 2, "tensor": 2}, {"sequence_parallel": True}),
}
SLOW = {("data 2", "shared"), ("expert 2", "shared"), ("fsdp 2, sequence", "softmax"), ("sequence", "softmax")}


def on(way, recipe, model="softmax", **how):
    axes, options = WAYS[way]
    return trained(recipe, axes, model, **options, **how)


on_tensor = functools.cache(functools.partial(on, "tensor 2"))


def gradients(found):
    return significant(gradients_of(found[0][0]))


def cases(meshes):
    pairs = itertools.product(meshes, ("softmax", "shared"))
    return [pytest.param(*pair, marks=pytest.mark.slow if pair in SLOW else ()) for pair in pairs]


@pytest.mark.parametrize(("way", "model"), cases(WAYS))
def test_in_float32_steps_are_those_of_one_device(way, model):
    found, wanted = on(way, "none", model), on_one_device("none", model=model)
    assert_close(gradients(found), gradients(wanted), EXACT)
    np.testing.assert_allclose(found[1], wanted[1], rtol=LOSS)


@pytest.mark.parametrize(("way", "model"), cases([way for way in WAYS if way != "tensor 2"]))
def test_in_fp8_every_mesh_has_the_numbers_of_tensor_alone(way, model):
    found, wanted = on(way, "delayed", model), on_tensor("delayed", model)
    assert_same_trees(found[0][0].fp8, wanted[0][0].fp8)
    assert_close(gradients(found), gradients(wanted), FIRST_SUMS)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_in_fp8_a_step_is_no_farther_from_float32_than_on_one_device(recipe):
    exact = gradients(on_one_device("none"))
    split, alone = (errors(gradients(found), exact) for found in (on_tensor(recipe), on_one_device(recipe)))
    mean, mean_alone = (np.mean([*distances.values()]) for distances in (split, alone))
    assert 0.01 < mean < FARTHER * mean_alone


@pytest.mark.parametrize("way", ["tensor 2", "sequence"])
def test_padding_goes_to_no_expert(way):
    batch = {"tokens": tokens(), "lengths": np.array([SEQ + 1, 9, 3, SEQ + 1, 1, 2, 30, 17], np.int32)}
    found, wanted = on(way, "none", batch=batch, steps=1), trained("none", batch=batch, steps=1)
    assert_close(gradients(found), gradients(wanted), EXACT)


@pytest.mark.parametrize("way", ["sequence", "expert 2, sequence"])
def test_rows_that_are_made_again(way):
    wanted, found = on(way, "delayed", steps=1), on(way, "delayed", steps=1, recompute=True)
    assert_same_trees(found[0][0].fp8, wanted[0][0].fp8)
    assert_close(gradients(found), gradients(wanted), FIRST_SUMS)


@pytest.mark.parametrize("way", ["tensor 2", "sequence"])
def test_diagnostics_are_of_all_tokens(way):
    """In FP8 a token near a tie may go elsewhere than on one device."""

    def experts(**options):
        loss = fp8.next_token_loss(model_of("delayed"))
        step = fp8.make_train_step(loss, SHOWING, RECIPES["delayed"], warm_start=False, **options)
        state = step.place(jax.tree.map(jnp.copy, state_of("delayed")), tokens())
        return step(state, tokens(), diagnose=True)[1]["diagnostics"].rows()["experts"][0]

    axes, options = WAYS[way]
    found, wanted = experts(parallel=fp8.Parallelism(make_mesh(**axes), **options)), experts()
    np.testing.assert_allclose(found["fractions"], wanted["fractions"], atol=0.01)
    assert sum(found["fractions"]) == pytest.approx(1) and found["dropped"] == 0
    assert found["entropy"] == pytest.approx(wanted["entropy"], rel=1e-3)


@pytest.mark.parametrize(
    ("recipe", "features", "sentence"),
    [
        ("none", 33, r"tensor=2 must divide the hidden features of experts of layer_0/mlp/.*, got 33 in shape"),
        ("delayed", 48, r"layer_0/mlp/.*FP8 needs out features divisible by 16 on each device of tensor=2, got 24"),
    ],
)
def test_what_is_refused(recipe, features, sentence):
    model = model_of(recipe, mlp_hidden_size=features)
    step = fp8.make_train_step(
        fp8.next_token_loss(model), optax.sgd(0.1), RECIPES[recipe], parallel=make_mesh(tensor=2)
    )
    with pytest.raises(ValueError, match=sentence):
        step(step.init_state(model.init, jax.random.key(0), tokens()[:, :-1]), tokens())


# ---- planted mistakes ------------------------------------------------------------------------------------------------


def farthest(way, **how):
    found = errors(gradients(on(way, "none", steps=1, **how)), gradients(on_one_device("none")))
    return max(found, key=found.__getitem__), max(found.values())


def test_a_sum_over_devices_that_is_left_out_is_noticed(monkeypatch):
    """Of the gradients of tokens and weights, or of the result."""
    monkeypatch.setattr(expert_mlp, "enter", lambda x, tensor: x)
    assert farthest("tensor 2")[1] > 100 * EXACT
    monkeypatch.undo()
    monkeypatch.setattr(expert_mlp, "leave", lambda x, tensor: x)
    assert farthest("tensor 2")[1] > 100 * EXACT


def test_a_loss_that_every_device_counts_is_noticed(monkeypatch):
    """With sequence parallelism, of the router: jax's own gradient of a sum over devices is the sum of their gradients.
    A loss of a device's own tokens alone is refused.
    """
    monkeypatch.setattr(router, "leave", lambda x, tensor: lax.psum(x, tensor.axis))
    name, error = farthest("sequence")
    assert "router" in name and error > 100 * EXACT
    monkeypatch.undo()
    monkeypatch.setattr(router, "leave", lambda x, tensor: x)
    with pytest.raises(ValueError, match="the loss must be the same on all devices of tensor=2"):
        on("sequence", "none", steps=1)


def test_other_tokens_than_a_devices_own_are_noticed(monkeypatch):
    """With sequence parallelism, of the cast of tokens that have a row: padding has none."""
    batch = {"tokens": tokens(), "lengths": np.full(8, 9, np.int32)}
    wanted = on("sequence", "delayed", batch=batch, steps=1)[0][0]
    others = lambda x, tensor: x if tensor is None else jnp.roll(x, 8, 0)[: x.shape[0] // tensor.size]  # noqa: E731
    monkeypatch.setattr(expert_mlp, "own_rows", others)
    found = on("sequence", "delayed", batch=batch, steps=1)[0][0]
    assert max(errors(significant(gradients_of(found)), significant(gradients_of(wanted))).values()) > 0.05
    assert jax.tree.structure(found.fp8) == jax.tree.structure(wanted.fp8)
