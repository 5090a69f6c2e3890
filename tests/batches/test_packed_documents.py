"""Documents that are packed into sequences: the loss and the gradients are those of the documents apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import with_scales
from reference import assert_close

import jax_fp8 as fp8
from jax_fp8.ops.attention import positions_in

SHAPE = {"vocab_size": 64, "num_layers": 1, "num_heads": 4, "hidden_size": 64, "max_seq_len": 32}
FORMS = {
    "gpt": {},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "use_bias": False, "num_kv_heads": 2},
}
LENGTHS = ((5, 11), (16,), (3, 5, 5))  # of the documents of each row; the last row ends in padding
LONGEST = 16


def gpt(form="gpt", **fields):
    return fp8.GPT(fp8.GPTConfig(**SHAPE | FORMS[form]), recipe=None, dtype=jnp.float32, **fields)


def packed(lengths=LENGTHS):
    """Tokens and numbers of documents (batch, seq + 1)."""
    tokens = np.array(jax.random.randint(jax.random.key(0), (len(lengths), LONGEST), 0, 64), np.int32)
    segment_ids = np.zeros_like(tokens)
    for row, of_row in enumerate(lengths):
        segment_ids[row, : sum(of_row)] = np.repeat(np.arange(1, len(of_row) + 1), of_row)
    return {"tokens": tokens, "segment_ids": segment_ids}


def apart(loss_fn, params, documents):
    """The mean over all next tokens of all documents, each a batch of its own, and its gradient; one program for all
    documents of a length."""
    of_one = jax.jit(jax.value_and_grad(lambda params, tokens: loss_fn({"params": params}, tokens)))
    shares = [len(document) - 1 for document in documents]
    found = [of_one(params, document[None]) for document in documents]
    return jax.tree.map(lambda *of_each: np.average(np.stack(of_each), axis=0, weights=shares), *found)


def documents_of(batch, lengths=LENGTHS):
    starts = [(row, first) for row, of_row in enumerate(lengths) for first in np.cumsum([0, *of_row[:-1]])]
    return [batch["tokens"][row, first : first + n] for (row, first), n in zip(starts, sum(lengths, ()), strict=True)]


def without_key_biases(gradients):
    """All but those whose gradient is nothing but rounding: what is added to every key changes no attention."""
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return [leaf for path, leaf in leaves if not jax.tree_util.keystr(path).endswith("['key']['bias']")]


@pytest.mark.versions
@pytest.mark.parametrize(("form", "remat"), [("gpt", "full"), ("llama", "none")])
def test_packed_documents_are_documents_apart(form, remat):
    model, batch = gpt(form, remat=remat), packed()
    params = jax.jit(model.init)(jax.random.key(1), batch["tokens"])["params"]
    loss_fn = fp8.next_token_loss(model)
    expected = apart(loss_fn, params, documents_of(batch))
    of_packed = jax.jit(jax.value_and_grad(lambda params, batch: loss_fn({"params": params}, batch)))
    loss, gradients = of_packed(params, batch)
    assert_close(loss, expected[0], "float32")
    pairs = zip(without_key_biases(gradients), without_key_biases(expected[1]), strict=True)
    for got, wanted in pairs:
        assert_close(got, wanted, "float32")

    # A token of the first document in the second, and one document of two.
    segment_ids = batch["segment_ids"].copy()
    segment_ids[0, 4] = 2
    leaking = batch | {"segment_ids": segment_ids}
    joined = batch | {"segment_ids": np.minimum(batch["segment_ids"], 1)}
    for wrong in (leaking, joined):
        loss, gradients = of_packed(params, wrong)
        assert abs(loss - expected[0]) > 1e-4
        with pytest.raises(AssertionError):
            assert_close(gradients["embedding"], expected[1]["embedding"], "float32")


def test_padding_is_nobodys():
    """What stands in it changes nothing, whatever it is."""
    model, batch = gpt(), packed()
    variables, loss_fn = jax.jit(model.init)(jax.random.key(1), batch["tokens"]), jax.jit(fp8.next_token_loss(model))
    other = batch | {"tokens": np.where(batch["segment_ids"] == 0, 63 - batch["tokens"], batch["tokens"])}
    assert loss_fn(variables, other) == loss_fn(variables, batch)
    tokens = batch["tokens"].copy()
    tokens[2, 7] += 1
    read = batch | {"tokens": tokens}
    assert loss_fn(variables, read) != loss_fn(variables, batch)
    ignoring = jax.jit(fp8.next_token_loss(model, ignore_label=-1))
    masked = batch | {"tokens": np.where(batch["segment_ids"] == 0, -1, batch["tokens"])}
    assert_close(ignoring(variables, masked), loss_fn(variables, batch), "float32")


@functools.cache
def model_and_variables():
    """In FP8, with scales as after a warm start."""
    model = fp8.GPT(fp8.GPTConfig(**SHAPE), recipe=fp8.DelayedScaling(amax_history_len=4))
    return model, with_scales(jax.jit(model.init)(jax.random.key(2), packed()["tokens"]))


@functools.cache
def step_of(microbatches=1, parallel=None):
    model, _ = model_and_variables()
    loss_fn, tx = fp8.next_token_loss(model), fp8.fused_adamw(3e-3)
    return fp8.make_train_step(loss_fn, tx, model.recipe, microbatches, parallel=parallel, warm_start=False), tx


def losses_of_steps(batch, microbatches=1, **options):
    """Of three steps."""
    (step, tx), variables = step_of(microbatches, **options), jax.tree.map(jnp.copy, model_and_variables()[1])
    state, found = step.place(fp8.TrainState.create(variables=variables, tx=tx), batch), []
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


def rows_of_documents():
    batch = jax.tree.map(lambda x: np.repeat(x[:2], 2, axis=0), packed())  # microbatches are strided, and so alike
    return jax.tree.map(lambda x: np.concatenate([x, x[:, -1:]], axis=1), batch)  # 16 positions


@functools.cache
def losses_on_one_device():
    return losses_of_steps(rows_of_documents())


def assert_are_those_of_one_device(found):
    expected = losses_on_one_device()
    assert found[0] == pytest.approx(expected[0], rel=2e-4)
    assert found == pytest.approx(expected, rel=1e-2)
    assert expected[2] < expected[0] - 0.05


def test_steps_of_two_microbatches():
    batch = rows_of_documents()
    assert_are_those_of_one_device(losses_of_steps(batch, microbatches=2))
    joined = batch | {"segment_ids": np.ones_like(batch["segment_ids"])}  # negative control
    assert losses_of_steps(joined)[0] != pytest.approx(losses_on_one_device()[0], rel=1e-3)


@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 2}, {"sequence": 2}], ids=str)
def test_steps_on_meshes(axes):
    sizes = {"tensor" if axis == "sequence" else axis: size for axis, size in axes.items()}
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices)
    parallel = fp8.Parallelism(mesh, sequence_parallel="sequence" in axes)
    found = losses_of_steps(rows_of_documents(), parallel=parallel)
    assert_are_those_of_one_device(found)


@pytest.mark.versions
def test_positions_begin_anew():
    assert positions_in(jnp.int32([[1, 1, 2, 2, 2, 1, 0, 0], [3] * 8])).tolist() == [
        [0, 1, 0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7]
    ]  # fmt: skip
    assert positions_in(jnp.int32([4, 5, 5])).tolist() == [0, 0, 1]


def test_what_is_refused():
    model, batch = gpt(), packed()
    variables, loss_fn = jax.eval_shape(model.init, jax.random.key(1), batch["tokens"]), fp8.next_token_loss(model)
    for wrong, message in (
        ({"tokens": batch["tokens"]}, 'a dict of "tokens" with "segment_ids" .* got a dict of \'tokens\''),
        (batch | {"segment_ids": batch["segment_ids"][:, 1:]}, r"must be an integer array \(3, 16\)"),
        (batch | {"segment_ids": batch["segment_ids"] * 1.0}, "must be an integer array"),
    ):
        with pytest.raises(ValueError, match=message):
            loss_fn(variables, wrong)
    with pytest.raises(ValueError, match=r"GPT: segment_ids must be an integer array \(3, 16\)"):
        model.apply(variables, batch["tokens"], segment_ids=batch["segment_ids"][:2])
    with pytest.raises(ValueError, match="layers one by one, without the segment_ids"):
        loss_fn.first(variables, batch)
