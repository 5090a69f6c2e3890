"""GPT: shapes, causality, the loss, and learning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

import jax_fp8 as fp8

SMALL = fp8.GPTConfig.preset("tiny", num_layers=2, hidden_size=64, max_seq_len=32)
TOKENS = jax.random.randint(jax.random.key(0), (4, 33), 0, 256)


@pytest.mark.versions
def test_logits_and_variables():
    model = fp8.GPT(SMALL, recipe=fp8.DelayedScaling(amax_history_len=2))
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS[:, :-1])
    assert jax.eval_shape(model.apply, variables, TOKENS[:, :-1]).shape == (4, 32, 256)
    assert set(variables["params"]) == {"embedding", "positions", "layer_0", "layer_1", "final_norm"}
    assert set(variables["fp8"]["layer_1"]) == {"attention", "mlp"}
    untied = fp8.GPT(fp8.GPTConfig.preset("tiny", tie_embeddings=False, positions="rotary", num_layers=1), recipe=None)
    assert set(jax.eval_shape(untied.init, jax.random.key(0), TOKENS[:, :-1])["params"]) == {
        "embedding",
        "head",
        "layer_0",
        "final_norm",
    }


def test_initial_loss_is_that_of_guessing():
    model = fp8.GPT(SMALL, recipe=None)
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS[:, :-1])
    assert jax.jit(fp8.next_token_loss(model))(variables, TOKENS) == pytest.approx(np.log(256), rel=0.02)


def test_fp8_learns_like_bfloat16():
    """With scales found in every step; those of a history learn in `benchmarks/convergence.py`, beside a control,
    and tests run that.
    """

    def train(recipe):
        model = fp8.GPT(SMALL, recipe=recipe)
        tx = fp8.fused_adamw(3e-3)
        variables = jax.jit(model.init)(jax.random.key(1), TOKENS[:, :-1])
        state = fp8.TrainState.create(variables=variables, tx=tx)
        step = fp8.make_train_step(fp8.next_token_loss(model), tx, recipe)
        for _ in range(12):
            state, metrics = step(state, TOKENS)
        return float(metrics["loss"])

    plain, quantized = train(None), train(fp8.CurrentScaling())
    assert plain < 4.8  # from 5.5
    assert quantized == pytest.approx(plain, rel=0.01)
    assert quantized != plain


def test_gradients_of_a_token_that_comes_often_are_added_up_in_float32():
    """For bfloat16 params too, and rounded in the end: a sum of bfloat16s stops growing."""
    tokens = jnp.zeros((4, 33), jnp.int32)
    model = fp8.GPT(dataclasses.replace(SMALL, tie_embeddings=False), recipe=None, dtype=jnp.float32)
    brain = model.clone(param_dtype=jnp.bfloat16)
    variables = jax.jit(brain.init)(jax.random.key(0), tokens[:, :-1])
    gradients = []
    for of in (model, brain):
        values = jax.tree.map(lambda leaf, of=of: leaf.astype(of.param_dtype), variables)
        gradients.append(jax.jit(jax.grad(fp8.next_token_loss(of)))(values, tokens)["params"]["embedding"][0])
    reference.assert_same_bits(gradients[1], gradients[0].astype(jnp.bfloat16))

    control = jax.grad(lambda embedding: jnp.sum(embedding[jnp.zeros(1024, jnp.int32)]))(jnp.ones(1, jnp.bfloat16))
    assert control == 256  # not 1024


def test_tokens_that_are_too_many_are_refused():
    with pytest.raises(ValueError, match="at most max_seq_len=32 tokens long, got 33"):
        fp8.GPT(SMALL, recipe=None).init(jax.random.key(0), TOKENS)


def test_padding_of_a_call_may_be_anything():
    model = fp8.GPT(SMALL, recipe=None)
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS[:, :-1])
    is_text = np.arange(32) < np.array([32, 5, 9, 20])[:, None]
    told = {"lengths": is_text.sum(1).astype(np.uint8)}, {"segment_ids": is_text.astype(np.uint8)}
    for options in told:
        apply = jax.jit(lambda tokens, options=options: jnp.asarray(model.apply(variables, tokens, **options)))
        found = apply(np.where(is_text, TOKENS[:, :-1], -1))
        assert (np.asarray(found == apply(np.where(is_text, TOKENS[:, :-1], 7))).all(-1) | ~is_text).all()


def test_layers_use_the_attention_that_is_asked_for():
    tokens = jnp.zeros((1, 32), jnp.int32)
    config = fp8.GPTConfig.preset("tiny", num_layers=1)
    for implementation in (None, "xla"):
        jax.eval_shape(fp8.GPT(config, attention_implementation=implementation).init, jax.random.key(0), tokens)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)cudnn"):
        fp8.GPT(config, attention_implementation="cudnn").init(jax.random.key(0), tokens)
