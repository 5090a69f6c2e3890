"""A record with a conversation → its tokens, and which of them are learned: those that the assistant wrote.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    ─ChatTemplate→ text, parts of the assistant ─tokenizer→ tokens, learned

A token is the assistant's if all of its characters are. So no token of a question is learned, not even one that begins
in the question and ends in the answer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_fp8.core.files import JsonObject, Unreadable, shown
from jax_fp8.run.chat_template import ASSISTANT, ChatTemplate, Rendered
from jax_fp8.run.encoders import LibraryEncoder
from jax_fp8.run.records import Record, check_can_be_encoded

MESSAGES, TOOLS = "messages", "tools"


class Document(NamedTuple):
    """The tokens of a document; `learned` says of each whether it is learned, None: all are."""

    tokens: np.ndarray
    learned: np.ndarray | None


class Conversations:
    """Encodes conversations by the template of a tokenizer."""

    def __init__(self, encoder: LibraryEncoder, where: str):
        if encoder.beside.template is None:
            raise ValueError(
                f"--chat needs a tokenizer with a chat template, in its tokenizer_config.json or chat_template.jinja, "
                f"got {where} without; name that of a model that answers, or add the template to its folder"
            )
        self.encoder, self.template = encoder, ChatTemplate(encoder.beside.template, encoder.beside.special, where)

    def encode(self, records: Sequence[Record]) -> list[Document]:
        """The documents of records; a ValueError names the record that is no conversation."""
        rendered = [self._render(record) for record in records]
        encodings = self.encoder.tokenizer.encode_batch([one.text for one in rendered], add_special_tokens=False)
        return [
            Document(np.asarray(encoding.ids, np.int32), learned_tokens(encoding.offsets, one))
            for encoding, one in zip(encodings, rendered, strict=True)
        ]

    def _render(self, record: Record) -> Rendered:
        try:
            messages = checked_messages(record.fields.get(MESSAGES))
            tools = record.fields.get(TOOLS)
            if not (tools is None or isinstance(tools, list)):
                raise Unreadable(f"{shown(tools)} as {TOOLS}")
            rendered = self.template.render(messages, tools)
            check_can_be_encoded(rendered.text)
            return rendered
        except Unreadable as error:
            raise ValueError(
                f"--chat needs records with a list {MESSAGES} that the chat template of {self.template.where} can "
                f"write, got {error} in {record.where}; mend the record, or leave it out"
            ) from None


def checked_messages(messages: object) -> list[JsonObject]:
    """The messages of a conversation, each with a role and a text. `Unreadable` where they are none."""
    if not isinstance(messages, list) or not messages:
        raise Unreadable(f"{shown(messages)} as {MESSAGES}")
    found = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Unreadable(f"message {number} without a role, {shown(message)},")
        message = {name: value for name, value in message.items() if value is not None}  # as parquet fills its columns
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and "tool_calls" in message):
            raise Unreadable(f"message {number} whose content is {shown(content)}, no text,")
        found.append({"content": "", **message})
    if not any(message["role"] == ASSISTANT for message in found):
        raise Unreadable(f"no message of the role {ASSISTANT}, from which there would be something to learn,")
    return found


def learned_tokens(offsets: Sequence[tuple[int, int]], rendered: Rendered) -> np.ndarray:
    """Which tokens the assistant wrote, by the characters that each token is of."""
    places = np.asarray(offsets, np.int64).reshape(-1, 2)
    is_learned = np.zeros(len(places), bool)
    for begin, end in rendered.spans:
        is_learned |= (places[:, 0] >= begin) & (places[:, 1] <= end) & (places[:, 1] > places[:, 0])
    return is_learned
