"""Sequences that end in padding: the loss and the gradients are those of each sequence alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batches.test_packed_documents import apart, gpt, losses_of_steps, without_key_biases
from reference import assert_close

import jax_fp8 as fp8

LENGTHS = (5, 16, 2)
BATCH = {
    "tokens": np.asarray(jax.random.randint(jax.random.key(0), (3, 16), 0, 64)),
    "lengths": np.int32(LENGTHS),
}
IS_TOKEN = np.arange(16)[None] < BATCH["lengths"][:, None]


def with_first(length):
    """The batch whose first sequence is said to be that long."""
    return BATCH | {"lengths": np.int32([length, *LENGTHS[1:]])}


def written_over():
    """The batch with other tokens in its padding."""
    return BATCH | {"tokens": np.where(IS_TOKEN, BATCH["tokens"], 63 - BATCH["tokens"])}


def expert_gpt(weight):
    sizes = {"num_layers": 1, "vocab_size": 64, "max_seq_len": 16}
    return fp8.GPT(fp8.GPTConfig.preset("tiny-moe", **sizes, router_aux_loss=weight), recipe=None)


def twice(batch):
    return jax.tree.map(lambda x: np.concatenate([x, x]), batch)


@pytest.mark.versions
@pytest.mark.parametrize(("form", "remat"), [("gpt", "none"), ("llama", "full")])
def test_padded_sequences_are_sequences_alone(form, remat):
    model = gpt(form, remat=remat)
    params = jax.jit(model.init)(jax.random.key(1), BATCH["tokens"])["params"]
    loss_fn = fp8.next_token_loss(model)
    expected = apart(loss_fn, params, [tokens[:n] for tokens, n in zip(BATCH["tokens"], LENGTHS, strict=True)])
    of_padded = jax.jit(jax.value_and_grad(lambda params, batch: loss_fn({"params": params}, batch)))
    loss, gradients = of_padded(params, BATCH)
    assert_close(loss, expected[0], "float32")
    for got, wanted in zip(without_key_biases(gradients), without_key_biases(expected[1]), strict=True):
        assert_close(got, wanted, "float32")

    longer = with_first(LENGTHS[0] + 1)  # negative control: a token of the padding counts
    loss, gradients = of_padded(params, longer)
    assert abs(loss - expected[0]) > 1e-4
    with pytest.raises(AssertionError):
        assert_close(gradients["embedding"], expected[1]["embedding"], "float32")


@pytest.mark.versions
def test_what_stands_in_padding_changes_nothing():
    model = gpt()
    variables, loss_fn = jax.jit(model.init)(jax.random.key(1), BATCH["tokens"]), jax.jit(fp8.next_token_loss(model))
    assert loss_fn(variables, written_over()) == loss_fn(variables, BATCH)
    read = BATCH | {"tokens": BATCH["tokens"] + (np.arange(48).reshape(3, 16) == 4)}
    assert loss_fn(variables, read) != loss_fn(variables, BATCH)


def test_padding_goes_to_no_expert():
    """What stands in padding changes neither what experts see nor what the router adds to the loss."""
    model = expert_gpt(1.0)
    variables, run = jax.jit(model.init)(jax.random.key(1), BATCH["tokens"]), fp8.next_token_loss(model)
    run, seen = jax.jit(jax.value_and_grad(run)), jax.jit(functools.partial(model.apply, mutable=["intermediates"]))
    jax.tree.map(np.testing.assert_array_equal, run(variables, written_over()), run(variables, BATCH))

    def fractions(batch):
        found = seen(variables, batch["tokens"], lengths=batch["lengths"])[1]
        return np.asarray(found["intermediates"]["layer_0"]["mlp"]["expert_fractions"][0])

    def alone(tokens, n):
        return fractions({"tokens": tokens[None, :n], "lengths": np.int32([n])}) * n / sum(LENGTHS)

    by_text = sum(alone(tokens, n) for tokens, n in zip(BATCH["tokens"], LENGTHS, strict=True))
    np.testing.assert_allclose(fractions(BATCH), by_text, atol=1e-6)
    longer = with_first(LENGTHS[0] + 9)  # negative control
    assert np.abs(fractions(longer) - by_text).max() > 0.01


@pytest.mark.parametrize("recipe", [fp8.CurrentScaling(), fp8.BlockScaling(), None], ids=["current", "block", "none"])
def test_a_layer_of_experts_does_without_padding(recipe):
    """To the bit, in FP8 too: padding is in no amax, and no gradient comes of it."""
    layer = fp8.LayerNormMoE(128, 4, recipe=recipe, router_aux_loss=1.0, router_z_loss=1.0)
    x = np.random.default_rng(0).normal(size=(2, 64, 128)).astype(jnp.bfloat16)
    variables, lengths = jax.jit(layer.init)(jax.random.key(1), x), np.int32([64, 20])
    is_token = (np.arange(64)[None] < lengths[:, None])[..., None]

    def loss(variables, x, lengths):
        y, left = layer.apply(variables, x, lengths=lengths, mutable=["losses"])
        counted = jnp.where(is_token, y, 0).astype(jnp.float32)
        return jnp.sum(jnp.square(counted)) + sum(jax.tree.leaves(left["losses"])), y

    run = jax.jit(fp8.value_and_grad(loss, has_aux=True))
    written_over = np.where(is_token, x, np.array(1000, x.dtype))
    found, other = run(variables, x, lengths), run(variables, written_over, lengths)
    jax.tree.map(np.testing.assert_array_equal, found[:2], other[:2])
    routed = run(variables, written_over, np.int32([64, 64]))  # negative control
    kernels = [np.asarray(of[1]["router"]["kernel"]) for of in (routed, found)]
    assert np.max(np.abs(kernels[0] - kernels[1])) > 1e-3
    y = np.asarray(found[0][1], np.float32)
    assert not y[1, 20:].any() and y[1, :20].any()


def test_a_layer_of_experts_is_told_a_length_for_each_sequence():
    layer = fp8.LayerNormMoE(128, 4, recipe=None)
    with pytest.raises(ValueError, match=r"lengths must be an integer array \(2,\)"):
        jax.eval_shape(layer.init, jax.random.key(1), np.ones((2, 16, 128)), lengths=np.int32([1, 2, 3]))


def test_the_loss_of_a_router_on_padded_sequences_over_data():
    """Devices have other numbers of tokens, and what the router adds is that of all tokens."""
    model = expert_gpt(5.0)
    loss_fn, tx = fp8.next_token_loss(model), optax.sgd(0.1)
    tokens = np.asarray(jax.random.randint(jax.random.key(3), (4, 17), 0, 64))
    batch = {"tokens": tokens, "lengths": np.int32([3, 4, 17, 16])}
    variables, loss = jax.jit(model.init)(jax.random.key(1), tokens[:, :-1]), jax.jit(loss_fn)
    whole = float(loss(variables, batch))
    step = fp8.make_train_step(loss_fn, tx, None, parallel=jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]))
    state = step.place(fp8.TrainState.create(variables=variables, tx=tx), batch)
    found = float(step(state, batch)[1]["loss"])
    parts = [jax.tree.map(lambda x, rows=rows: x[rows], batch) for rows in (slice(2), slice(2, 4))]
    halves = [float(loss(variables, twice(part))) for part in parts]
    assert found == pytest.approx(whole, abs=2e-3)
    assert abs(np.mean(halves) - whole) > 0.01  # negative control


@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
def test_steps_on_padded_sequences(axes):
    """A step in FP8, in one and in two microbatches, alone and on a mesh."""
    tokens = np.repeat(np.concatenate([BATCH["tokens"], BATCH["tokens"][:, :1]], axis=1)[:2], 2, axis=0)
    batch = {"tokens": tokens, "lengths": np.repeat(np.int32([5, 17]), 2)}  # microbatches are strided, and so alike
    expected = losses_of_steps(batch)
    assert expected[2] < expected[0] - 0.05
    if axes:
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        found = losses_of_steps(batch, parallel=mesh)
        parts = [jax.tree.map(lambda x, rows=rows: x[rows], batch) for rows in (slice(2), slice(2, 4))]
        halves = [losses_of_steps(twice(part))[0] for part in parts]
        assert np.mean(halves) != pytest.approx(expected[0], rel=2e-4)  # negative control: the mean of the devices'
    else:
        found = losses_of_steps(batch, microbatches=2)
        whole = losses_of_steps(batch | {"lengths": np.full(4, 17, np.int32)})  # negative control
        assert whole[0] != pytest.approx(expected[0], rel=1e-3)
    assert found[0] == pytest.approx(expected[0], rel=5e-5)
    assert found == pytest.approx(expected, rel=1e-2)


def test_what_is_refused():
    model = gpt()
    variables, loss_fn = jax.eval_shape(model.init, jax.random.key(1), BATCH["tokens"]), fp8.next_token_loss(model)
    segment_ids = np.ones_like(BATCH["tokens"])
    for wrong, message in (
        (
            BATCH | {"segment_ids": segment_ids},
            "padding must be marked by segment_ids or by lengths, got both; leave lengths",
        ),
        (
            BATCH | {"mask": segment_ids},
            'a dict of "tokens" with "segment_ids" or "lengths", with "loss_mask" or "labels", .*\'mask\'',
        ),
        (BATCH | {"lengths": BATCH["lengths"][:2]}, r"a batch: lengths must be an integer array \(3,\), for each seq"),
        (
            BATCH | {"lengths": BATCH["lengths"].astype(np.float32)},
            r"lengths must be an integer array \(3,\), .*got float32\[3\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            loss_fn(variables, wrong)
    with pytest.raises(ValueError, match="GPT: padding must be marked by segment_ids or by lengths, got both"):
        model.apply(variables, BATCH["tokens"], segment_ids=segment_ids, lengths=BATCH["lengths"])
    with pytest.raises(ValueError, match="layers one by one, without the lengths of a batch"):
        loss_fn.first(variables, BATCH)
