"""A tokenizer's chat template: the messages of a conversation → one text, and which parts of it the assistant wrote.

A template is a program in Jinja that comes with a model, from a stranger. It runs in Jinja's sandbox, which has no way
to files or to Python itself. (It can still take much time or memory, as in `transformers`.) `raise_exception` and
`tojson` are as in `transformers`. The date of today is not there, or else a run could not be repeated.

Which parts are the assistant's:
    with {% generation %} ... {% endgeneration %}   what stands between these marks
    without                                         for each of its messages, what the text of the conversation up to
                                                    this message has beyond the text up to the message before, with the
                                                    beginning of an answer
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jax_fp8.core.files import JsonObject, Unreadable, shortened

ASSISTANT = "assistant"
MOST_TEXT = 2**26  # characters of a conversation
Span = tuple[int, int]


class Rendered(NamedTuple):
    """A conversation as text; `spans` has the begin and end of each part that the assistant wrote."""

    text: str
    spans: list[Span]


class ChatTemplate:
    """A compiled template; ValueError in one sentence where it cannot be compiled.

    Args:
      source: in Jinja.
      special: the tokenizer's special tokens by name, such as "bos_token", which templates use.
      where: the tokenizer, for messages.
    """

    def __init__(self, source: str, special: Mapping[str, str], where: str):
        self.special, self.where = special, where
        self._environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[Marks, "jinja2.ext.loopcontrols"]
        )
        self._environment.filters["tojson"] = _to_json
        self._environment.globals["raise_exception"] = _refuse
        try:
            self._template = self._environment.from_string(source)
            self.has_marks = any(
                isinstance(node.call.node, jinja2.nodes.ExtensionAttribute)
                for node in self._environment.parse(source).find_all(jinja2.nodes.CallBlock)
            )
        except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError, OverflowError) as error:
            raise ValueError(
                f"the chat template of {where} must be a template of Jinja, got {_in_words(error)}; copy it again"
            ) from None

    def render(self, messages: Sequence[JsonObject], tools: list | None = None) -> Rendered:
        """The text of a conversation; `Unreadable` in a few words where the template has none for it."""
        if self.has_marks:
            return _without_marks(self._text(messages, tools, self._environment.mark), self._environment.mark)
        whole, spans = self._text(messages, tools), []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._text(messages[:number], tools, begins_answer=True)
            through = self._text(messages[: number + 1], tools)
            if not (whole.startswith(through) and through.startswith(before)):
                raise Unreadable(
                    f"a text up to message {number + 1} that is not how the text of all messages begins, so that its "
                    "answers cannot be told from the rest without {% generation %} in the template"
                )
            spans.append((len(before), self._end(before, through)))
        return Rendered(whole, spans)

    def _end(self, before: str, through: str) -> int:
        """The end of an answer: spaces and line ends behind the token that ends it are no part of it."""
        stripped = through.rstrip()
        ends = tuple(token for token in self.special.values() if token)
        return len(stripped) if len(stripped) > len(before) and ends and stripped.endswith(ends) else len(through)

    def _text(
        self, messages: Sequence[JsonObject], tools: list | None, mark: str = "", begins_answer: bool = False
    ) -> str:
        self._environment.active = mark
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=list(messages), tools=tools, add_generation_prompt=begins_answer, **self.special
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MOST_TEXT:
                    raise Unreadable(f"a text of more than {MOST_TEXT:,} characters")
        except Unreadable:
            raise
        except Exception as error:  # a template may make any operation of Python fail
            raise Unreadable(f"the template's error {_in_words(error)}") from None
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox. `mark` stands around the assistant's parts of a text, where `active` is the mark and not empty.
    It is random, so no message has it.
    """

    active: str = ""

    def __init__(self, **options: object):
        super().__init__(**options)  # type: ignore[arg-type]
        self.mark = f"\ue000{secrets.token_hex(8)}\ue001"


class Marks(jinja2.ext.Extension):
    """The tag `{% generation %}`, which `transformers` has: around what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own name

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        assert isinstance(self.environment, _Sandbox)
        mark = self.environment.active
        return f"{mark}{caller()}{mark}"


def _without_marks(text: str, mark: str) -> Rendered:
    """The text without marks, and where they were: every second part is the assistant's."""
    spans, length = [], 0
    parts = text.split(mark)
    for number, part in enumerate(parts):
        if number % 2:
            spans.append((length, length + len(part)))
        length += len(part)
    return Rendered("".join(parts), spans)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As `transformers` has it: without HTML's escapes, which Jinja's own filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> NoReturn:
    """`raise_exception(message)`, by which a template refuses a conversation."""
    raise jinja2.exceptions.TemplateError(shortened(str(message)))


def _in_words(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "one that is nested too deeply"
    return shortened(str(error) or type(error).__name__)
