"""What a GPT refuses: tokens that are none, and settings of its loss."""

import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8

pytestmark = pytest.mark.versions

CONFIG = fp8.GPTConfig.preset("tiny", num_layers=1, hidden_size=32, num_heads=2, max_seq_len=32)
MODEL = fp8.GPT(CONFIG, recipe=None)
TOKENS = jnp.zeros((2, 17), jnp.int32)


def call(tokens, *labels, config=CONFIG, **options):
    return fp8.GPT(config, recipe=None).init(jax.random.key(0), tokens, *labels, **options)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (TOKENS[0], r"tokens must be an integer array \(batch, seq\), got int32\[17\]; cast or reshape it"),
        (TOKENS[None], r"tokens must be an integer array \(batch, seq\), got int32\[1, 2, 17\]"),
        (TOKENS[0, 0], r"tokens must be an integer array \(batch, seq\), got int32\[\]"),
        (TOKENS.astype(jnp.float32), r"tokens must be an integer array \(batch, seq\), got float32\[2, 17\]"),
        (TOKENS == 0, r"tokens must be an integer array \(batch, seq\), got bool\[2, 17\]"),
        ([[1, 2]], r"tokens must be an integer array \(batch, seq\), got a list"),
        ("hello", r"tokens must be an integer array \(batch, seq\), got a str"),
        (TOKENS[:0], r"tokens .* at least 1 row and 1 column, got int32\[0, 17\]; leave empty batches out"),
        (TOKENS[:, :0], r"tokens .* at least 1 row and 1 column, got int32\[2, 0\]"),
    ],
)
def test_tokens_of_a_model(tokens, message):
    with pytest.raises(ValueError, match=message):
        call(tokens)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (TOKENS[:, :1], r"tokens \(batch, seq \+ 1\) must have at least 1 row and 2 columns, got int32\[2, 1\]"),
        (TOKENS[:0], r"tokens \(batch, seq \+ 1\) must have at least 1 row and 2 columns, got int32\[0, 17\]"),
        (TOKENS[0], r"tokens must be an integer array \(batch, seq \+ 1\), got int32\[17\]"),
        (
            {"tokens": TOKENS},
            'a batch must be its tokens, or a dict of "tokens" with "segment_ids" or .* got a dict of \'tokens\'',
        ),
        (None, r"tokens must be an integer array \(batch, seq \+ 1\), got None"),
        (
            {"labels": TOKENS, "lengths": TOKENS[:, 0]},
            "got a dict of 'labels', 'lengths'; name its arrays so, and leave",
        ),
        (
            {"tokens": TOKENS, "attention_mask": TOKENS},
            '"lengths", with "loss_mask" or "labels", or with one of each .*, got a dict of .*\'attention_mask\'',
        ),
        ({"tokens": TOKENS, "loss_mask": TOKENS, "labels": TOKENS}, "marked by loss_mask or by labels, got both; pass"),
        (
            {"tokens": TOKENS, "loss_mask": TOKENS[:, 1:]},
            r"loss_mask must be a bool or real array \(2, 17\), one .*, got int32\[2, 16\]; cast or reshape it",
        ),
        ({"tokens": TOKENS, "loss_mask": TOKENS * 1j}, r"loss_mask must be a bool or real .*, got complex64\[2, 17\]"),
        ({"tokens": TOKENS, "loss_mask": [[1]]}, "loss_mask must be a bool or real .*, got a list"),
        ({"tokens": TOKENS, "labels": TOKENS * 1.0}, r"labels must be an integer array \(2, 17\), .*got float32"),
        ({"tokens": TOKENS, "labels": TOKENS == 0}, r"labels must be an integer array \(2, 17\), .*got bool"),
    ],
)
def test_tokens_of_a_loss(tokens, message):
    with pytest.raises(ValueError, match=message):
        fp8.next_token_loss(MODEL)({"params": {}}, tokens)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fp8.next_token_loss(CONFIG), r"next_token_loss needs a model, got a GPTConfig; pass GPT\(config\)"),
        (lambda: fp8.next_token_loss(fp8.GPT), "next_token_loss needs a model, got the class GPT; pass"),
        (lambda: fp8.next_token_loss(MODEL, z_loss="a"), "z_loss must be a finite number .*, got 'a'"),
        (
            lambda: fp8.next_token_loss(MODEL, z_loss=-1.0),
            "z_loss must be a finite number that is not negative, got -1",
        ),
        (lambda: fp8.next_token_loss(MODEL, ignore_label=0.5), "ignore_label must be an integer .*, got 0.5"),
        (
            lambda: fp8.next_token_loss(MODEL, ignore_label=2**31),
            "ignore_label must be an integer from .*, got 2147483",
        ),
        (lambda: call(TOKENS, TOKENS * 1.0), r"labels must be integers, got float32\[2, 17\]; pass token numbers"),
        (lambda: call(TOKENS, TOKENS > 0), r"labels must be integers, got bool\[2, 17\]; pass token numbers"),
        (
            lambda: call(TOKENS, config="gpt2-124m"),
            r"config must be a GPTConfig, got 'gpt2-124m'; pass GPTConfig.preset",
        ),
        (
            lambda: call(TOKENS, mask=jnp.ones((2, 17))),
            "mask and z_loss are for the loss, got them without labels; pass",
        ),
        (lambda: call(TOKENS, [[1]]), r"labels must be an array like tokens, got a list; pass jnp.asarray\(labels\)"),
        (lambda: call(TOKENS, TOKENS, mask="all"), "mask must be an array like tokens, got a str"),
        (lambda: fp8.GPT(CONFIG, dtype="bf16").init(jax.random.key(0), TOKENS), "dtype must be jnp.bfloat16, .*'bf16'"),
        (lambda: call(TOKENS, TOKENS, z_loss="a"), "z_loss must be a finite number .*, got 'a'"),
    ],
)
def test_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()
