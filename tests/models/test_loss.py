"""The loss of next tokens: of a GPT and of other models, of tokens of any dtype, and of what is no token."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import jax_fp8 as fp8

SMALL = fp8.GPTConfig.preset("tiny", num_layers=1, hidden_size=64, max_seq_len=32)
TOKENS = np.asarray(jax.random.randint(jax.random.key(0), (4, 33), 0, 256))


@functools.cache
def model_and_variables():
    model = fp8.GPT(SMALL, recipe=None)
    return model, jax.jit(model.init)(jax.random.key(0), TOKENS[:, :-1])


@functools.cache
def with_gradients(of):
    return jax.jit(jax.value_and_grad(fp8.next_token_loss(of)))


@functools.cache
def forward():
    return jax.jit(model_and_variables()[0].apply)


def test_loss_is_the_mean_cross_entropy_of_next_tokens():
    model, variables = model_and_variables()
    logits = np.asarray(forward()(variables, TOKENS[:, :-1]), np.float64)
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    picked = np.take_along_axis(probability, np.asarray(TOKENS[:, 1:, None]), axis=-1)
    loss, gradients = with_gradients(model)(variables, TOKENS)
    assert loss == pytest.approx(-np.log(picked).mean(), rel=1e-4)
    assert jax.jit(optax.tree.norm)(gradients) > 0.1


class Head(nn.Module):
    """Another module that maps tokens to logits: the GPT itself, seen from outside."""

    model: fp8.GPT

    def __call__(self, tokens):
        return self.model(tokens)


@pytest.mark.versions
@pytest.mark.parametrize("head_recipe", [None, fp8.CurrentScaling()], ids=["bf16", "fp8"])
def test_the_loss_of_a_gpt_is_that_of_its_logits(head_recipe):
    """Padding, the z-loss and gradients included; the GPT computes its loss by chunks, another module from logits."""
    model = fp8.GPT(SMALL, recipe=None, head_recipe=head_recipe)
    _, variables = model_and_variables()
    padded = np.where(np.arange(33) < 20, TOKENS, -100)
    settings = {"ignore_label": -100, "z_loss": 1e-2}

    def value_and_grads(of, params):
        return jax.jit(jax.value_and_grad(fp8.next_token_loss(of, **settings)))({"params": params}, padded)

    loss, grads = value_and_grads(model, variables["params"])
    expected, expected_grads = value_and_grads(Head(model), {"model": variables["params"]})
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(loss) != pytest.approx(float(jax.jit(fp8.next_token_loss(model))(variables, TOKENS)), rel=1e-3)
    theirs = expected_grads["params"]["model"]
    for name in ("embedding", "positions"):
        # In FP8 the gradients of the logits are scaled by what they may be, or by what they are.
        reference.assert_close(grads["params"][name], theirs[name], "linear_gradient" if head_recipe else "bfloat16")
    assert not np.any(grads["params"]["positions"][20:])  # what is padded teaches nothing
    assert np.all(np.any(grads["params"]["positions"][:19], axis=-1))


BYTES = np.frombuffer(b"f\xc3\xbcr die K\xc3\xb6nigin, die quick brown fox" * 2, np.uint8)[:66].reshape(2, 33)
WIDE = ("int16", "uint16", "int32", "uint32", "int64", "uint64")


@pytest.mark.versions
@pytest.mark.parametrize("vocab", [256, 50_304])
def test_tokens_of_every_dtype_have_one_loss(vocab):
    """As tokens, and as labels of the model; an int8 holds the half of them."""
    model = fp8.GPT(dataclasses.replace(SMALL, vocab_size=vocab), recipe=None, dtype=jnp.float32)
    variables = jax.jit(model.init)(jax.random.key(0), BYTES[:, :-1])
    loss_fn = jax.jit(fp8.next_token_loss(model, ignore_label=-61))  # as uint8, it is 195
    for tokens, dtypes in ((BYTES, ("uint8", *WIDE)), (BYTES % 128, ("int8", "uint8", "int32"))):
        found = [float(loss_fn(variables, tokens.astype(dtype))) for dtype in dtypes]
        assert found == pytest.approx([found[-1]] * len(found), rel=1e-6)
        assert np.isfinite(found[-1])
    assert np.isnan(loss_fn(variables, BYTES.view(np.int8)))  # negative control: these are other numbers
    apply = jax.jit(model.apply)
    narrow = BYTES[:, :-1], BYTES[:, 1:]
    assert float(apply(variables, *narrow)) == pytest.approx(float(apply(variables, *map(np.int32, narrow))), rel=1e-6)


def row_with(token, at=0, row=1):
    tokens = np.array(TOKENS)
    tokens[row, at] = token
    return tokens


@pytest.mark.versions
@pytest.mark.parametrize("token", [256, 9999, -1, -100, 2**31 - 1, -(2**31)])
def test_what_is_no_token_has_no_logits(token):
    model, variables = model_and_variables()
    logits = np.asarray(forward()(variables, row_with(token, at=5)[:, :-1]), np.float32)
    others = np.asarray(forward()(variables, TOKENS[:, :-1]), np.float32)
    assert np.isnan(logits[1, 5:]).all()
    np.testing.assert_array_equal(logits[[0, 2, 3]], others[[0, 2, 3]])
    for of in (model, Head(model)):  # as an input alone, for nobody's next token is the first one of a row
        own = variables if of is model else {"params": {"model": variables["params"]}}
        run = with_gradients(of)
        loss, gradients = run(own, row_with(token))
        assert np.isnan(loss) and not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
        assert np.isfinite(run(own, TOKENS)[0])  # negative control


def test_a_step_skips_what_is_no_token():
    recipe = fp8.DelayedScaling(amax_history_len=2)
    model, tx = fp8.GPT(SMALL, recipe=recipe), fp8.fused_adamw(1e-2)
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, recipe, warm_start=False)
    state = step.init_state(model.init, jax.random.key(0), TOKENS[:, :-1])
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = step(state, row_with(9999), skip_above=np.inf)
    assert np.isnan(metrics["loss"]) and metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state.params))


@pytest.mark.versions
def test_a_prompt_that_is_written_over_is_not_learned_from():
    """With ignore_label over it, the model would read some other token in its place."""
    model, variables = model_and_variables()
    prompt = np.arange(33)[None] < np.array([9, 0, 4, 20])[:, None]
    over = np.where(prompt, -100, TOKENS)
    for of in (model, Head(model)):
        own = variables if of is model else {"params": {"model": variables["params"]}}
        loss_fn = jax.jit(fp8.next_token_loss(of, ignore_label=-100))
        assert np.isnan(loss_fn(own, over))
        told = [
            loss_fn(own, {"tokens": TOKENS, "labels": over}),
            loss_fn(own, {"tokens": TOKENS, "loss_mask": ~prompt}),
        ]
        assert told[0] == told[1] and np.isfinite(told[0])
        assert told[0] != loss_fn(own, TOKENS)
        # Behind the last learned token -100 may stand, and another token changes nothing.
        padded = np.where(np.arange(33) < 20, TOKENS, -100)
        other = {"tokens": np.where(padded < 0, 7, padded), "labels": padded}
        assert float(loss_fn(own, padded)) == pytest.approx(float(loss_fn(own, other)), rel=1e-6)


def test_an_ignored_token_of_the_vocabulary_is_read():
    """An end of text, which is padding as well."""
    model, variables = model_and_variables()
    tokens = np.where(np.arange(33) % 5 == 3, 17, TOKENS)
    ignoring, told = fp8.next_token_loss(model, ignore_label=17), fp8.next_token_loss(model)
    found = jax.jit(ignoring)(variables, tokens)
    assert found == jax.jit(told)(variables, {"tokens": tokens, "loss_mask": tokens != 17})
    assert found != jax.jit(ignoring)(variables, np.where(tokens == 17, 0, tokens))


def test_another_model_takes_tokens_alone():
    model = Head(fp8.GPT(SMALL, recipe=None))
    with pytest.raises(
        ValueError, match=r"the lengths of a batch are for a GPT, and .* takes tokens alone; leave them"
    ):
        fp8.next_token_loss(model)({}, {"tokens": TOKENS, "lengths": np.full(4, 9)})
