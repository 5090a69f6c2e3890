"""Conversations: loss and gradients as those of a loss written by hand, wherever the tokens lie."""

import dataclasses

import chats
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fp8 as fp8
from jax_fp8.core.files import Unreadable
from jax_fp8.run.conversations import Conversations, checked_messages, learned_tokens
from jax_fp8.run.data import read_data
from jax_fp8.run.devices import make_mesh, on_mesh
from jax_fp8.run.encoders import load_named
from jax_fp8.run.records import Record
from jax_fp8.run.settings import Settings

SEQ, BATCH = 159, 8


def by_hand(encoder, messages):
    """The tokens of a conversation, and which of them are learned, piece by piece and without a template."""
    pieces = [("<|endoftext|>", False)]
    for message in messages:
        is_answer = message["role"] == "assistant"
        pieces += [(f"<|im_start|>{message['role']}\n", False), (f"{message['content']}<|im_end|>", is_answer)]
        pieces += [("\n", False)]
    ids = [encoder.tokenizer.encode(text).ids for text, _ in pieces]
    learned = [is_learned for one, (_, is_learned) in zip(ids, pieces, strict=True) for _ in one]
    return np.concatenate(ids).astype(np.int32), np.array(learned)


def test_tokens_of_the_assistant_are_learned_and_no_others(tmp_path):
    records = chats.conversations()
    found = []
    for name, template in (("plain", chats.PLAIN), ("marked", chats.MARKED)):
        encoder = load_named(chats.write_tokenizer(tmp_path / name, template))
        documents = Conversations(encoder, name).encode([Record(record, "here") for record in records])
        for record, document in zip(records, documents, strict=True):
            tokens, learned = by_hand(encoder, record["messages"])
            np.testing.assert_array_equal(document.tokens, tokens)
            np.testing.assert_array_equal(document.learned, learned)
        found.append(documents)
    assert sum(document.learned.sum() for document in found[0]) > 300
    assert not all(document.learned.all() for document in found[0])


def test_a_token_of_question_and_answer_is_not_learned():
    class Text:
        text, spans = "ab", [(3, 8)]

    offsets = [(0, 3), (2, 4), (3, 3), (3, 5), (5, 8), (7, 9), (9, 12)]
    assert learned_tokens(offsets, Text()).tolist() == [False, False, False, True, True, False, False]


# ---- loss and gradients ----------------------------------------------------------------------------------------------


class Tuning:
    """A model, one batch of packed conversations, and the loss of the same conversations by hand."""

    def __init__(self, folder):
        chats.write_tokenizer(folder / "model")
        lines = chats.write_lines(folder / "chat.jsonl", chats.conversations(90))
        settings = Settings(
            data=lines,
            chat=True,
            tokenizer=str(folder / "model"),
            seq_len=SEQ,
            batch_size=BATCH,
            cache=folder / "cache",
        )
        encoder, self.train, _ = read_data(settings)
        self.batch = self.train.training(1)
        self.documents = [by_hand(encoder, record["messages"]) for record in chats.conversations(90)]
        config = fp8.GPTConfig.preset(
            "tiny-llama",
            vocab_size=384,
            num_layers=2,
            hidden_size=64,
            num_heads=4,
            mlp_hidden_size=128,
            max_seq_len=SEQ,
        )
        self.model = fp8.GPT(config, recipe=None, dtype=jnp.float32)
        params = jax.jit(self.model.init)(jax.random.key(0), np.zeros((1, SEQ), np.int32))["params"]
        self.params = jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim > 1 else leaf, params)

    def in_batch(self):
        """The documents that the batch has, as long as they are in it."""
        found = []
        for row, segments in zip(self.batch["tokens"], self.batch["segment_ids"], strict=True):
            for segment in range(1, segments.max() + 1):
                tokens = row[segments == segment]
                (same,) = [
                    (ids[: SEQ + 1], learned[: SEQ + 1])
                    for ids, learned in self.documents
                    if np.array_equal(ids[: SEQ + 1], tokens)
                ][:1]
                found.append(same)
        return found

    def loss_by_hand(self, params):
        """Each conversation alone in its row, in float32: the sum over learned tokens by their number."""
        documents = self.in_batch()
        tokens, learned = np.zeros((len(documents), SEQ + 1), np.int32), np.zeros((len(documents), SEQ + 1), bool)
        for row, (ids, is_learned) in enumerate(documents):  # causal: what is behind a conversation changes nothing
            tokens[row, : len(ids)], learned[row, : len(ids)] = ids, is_learned
        logits = self.model.apply({"params": params}, tokens[:, :-1]).astype(jnp.float32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=2)[..., 0]
        return -jnp.sum(chosen * learned[:, 1:]) / learned[:, 1:].sum()

    def step(self, batch, mesh="data=1", microbatches=1):
        """The loss and the gradients of one step."""
        tx, placed = optax.sgd(1.0), make_mesh(mesh)
        parallel = placed if placed.size > 1 else None
        step = fp8.make_train_step(fp8.next_token_loss(self.model), tx, None, microbatches, parallel=parallel)
        state = fp8.TrainState.create(variables={"params": jax.tree.map(jnp.copy, self.params)}, tx=tx)
        state, metrics = step(step.place(state, batch), on_mesh(placed, batch))
        return float(metrics["loss"]), jax.tree.map(
            lambda a, b: np.asarray(a) - np.asarray(b), self.params, state.params
        )


@pytest.fixture(scope="module")
def tuning(tmp_path_factory):
    made = Tuning(tmp_path_factory.mktemp("tuning"))
    made.loss, made.gradients = jax.jit(jax.value_and_grad(made.loss_by_hand))(made.params)
    return made


def difference(gradients, expected):
    """The largest difference of any gradient, by the norm of that gradient."""
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


@pytest.mark.parametrize(
    ("mesh", "microbatches"), [("data=1", 1), ("data=1", 4), ("data=2,fsdp=2", 2), ("data=2,tensor=2", 2)]
)
def test_loss_and_gradients_are_those_of_a_loss_by_hand(mesh, microbatches, tuning):
    """Over microbatches and devices with different numbers of learned tokens, beside padding and other documents."""
    counts = (tuning.batch["loss_mask"][:, 1:] & (tuning.batch["segment_ids"][:, 1:] > 0)).sum(axis=1)
    assert len(set(counts.tolist())) > 3 and (tuning.batch["segment_ids"] == 0).any()
    assert tuning.batch["segment_ids"].max() > 1
    loss, gradients = tuning.step(tuning.batch, mesh, microbatches)
    assert loss == pytest.approx(float(tuning.loss), rel=1e-5) and loss > 1
    assert difference(gradients, tuning.gradients) < 1e-4


def test_one_token_of_a_question_that_is_learned_is_noticed(tuning):
    """By the comparison above: a negative control."""
    row, place = np.argwhere(
        ~tuning.batch["loss_mask"] & (tuning.batch["segment_ids"] == 1) & (np.arange(SEQ + 1) > 0)
    )[0]
    leaked = {name: array.copy() for name, array in tuning.batch.items()}
    leaked["loss_mask"][row, place] = True
    loss, gradients = tuning.step(leaked)
    assert loss != pytest.approx(float(tuning.loss), rel=1e-4)
    assert difference(gradients, tuning.gradients) > 1e-2


# ---- refused ---------------------------------------------------------------------------------------------------------

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
NO_CONVERSATION = {
    "a text": ("hello", "'hello' as messages"),
    "nothing": ([], "\\[\\] as messages"),
    "no objects": (["hello"], "message 1 without a role, 'hello'"),
    "no role": ([USER, {"content": "b"}], "message 2 without a role"),
    "a number as role": ([{**USER, "role": 1}], "message 1 without a role"),
    "no content": ([USER, {"role": "assistant"}], "message 2 whose content is None, no text"),
    "parts": ([{"role": "user", "content": [{"type": "text"}]}, ANSWER], "message 1 whose content is "),
    "no answer": ([USER], "no message of the role assistant"),
}


@pytest.mark.parametrize("case", NO_CONVERSATION)
def test_what_is_no_conversation(case):
    messages, words = NO_CONVERSATION[case]
    with pytest.raises(Unreadable, match=words):
        checked_messages(messages)


def test_a_message_may_have_fields_of_its_own():
    called = {"role": "assistant", "tool_calls": [{"name": "f"}], "content": None, "name": None}
    assert checked_messages([USER, called]) == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
    ]


def test_a_record_that_is_refused_is_named(tmp_path):
    encoder = load_named(
        chats.write_tokenizer(tmp_path, chats.PLAIN.replace("{% for", "{{ '' if tools else '' }}{% for"))
    )
    conversations = Conversations(encoder, "here")
    for fields, words in (
        ({"messages": [USER]}, "no message of the role assistant"),
        ({"messages": [USER, ANSWER], "tools": "f"}, "'f' as tools"),
        ({"messages": [USER, ANSWER | {"role": "assistant", "content": "\ud800"}]}, r"half of a character, .ud800"),
    ):
        with pytest.raises(ValueError, match=rf"--chat needs records with a list messages.* got .*{words}.* in line 3"):
            conversations.encode([Record({"messages": [USER, ANSWER]}, "line 2"), Record(fields, "line 3")])


def test_a_tokenizer_without_a_template(tmp_path):
    encoder = load_named(chats.write_tokenizer(tmp_path, None))
    with pytest.raises(ValueError, match=r"--chat needs a tokenizer with a chat template, .* got here without; name"):
        Conversations(encoder, "here")
    assert dataclasses.replace(encoder.beside, template="{{ 1 }}").template
