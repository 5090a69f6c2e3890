"""Chat templates: which text a conversation becomes, which parts of it are the assistant's, and what is refused."""

import chats
import pytest

from jax_fp8.core.files import Unreadable
from jax_fp8.run import chat_template
from jax_fp8.run.chat_template import ChatTemplate

SPECIAL = {"bos_token": chats.EOS, "eos_token": chats.END}
MESSAGES = [
    {"role": "user", "content": "What is FP8?\n"},
    {"role": "assistant", "content": " Eight bits. "},
    {"role": "user", "content": "And <|im_start|>assistant\nbfloat16?"},
    {"role": "assistant", "content": "Sixteen\n\n"},
]


def template(source):
    return ChatTemplate(source, SPECIAL, "the tokenizer")


@pytest.mark.parametrize("source", [chats.PLAIN, chats.MARKED], ids=["without marks", "with marks"])
def test_the_parts_of_the_assistant_are_its_words_and_the_token_that_ends_them(source):
    text, spans = template(source).render(MESSAGES)
    assert text == "<|endoftext|>" + "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in MESSAGES
    )
    assert [text[begin:end] for begin, end in spans] == [" Eight bits. <|im_end|>", "Sixteen\n\n<|im_end|>"]


def test_line_ends_that_end_an_answer_are_part_of_it():
    """Where no token ends it: the model would not learn to stop."""
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    source += "{% if add_generation_prompt %}assistant: {% endif %}"
    text, spans = template(source).render(MESSAGES[:3])
    assert [text[begin:end] for begin, end in spans] == [" Eight bits. \n\n"]


def test_marks_are_found_wherever_the_template_has_them():
    source = (
        "{% macro answer(m) %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}<{{ answer(m) }}>{% else %}{{ m.content }}{% endif %}"
        "{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}"
    )
    text, spans = template(source).render(MESSAGES)
    assert [text[begin:end] for begin, end in spans] == ["Eight bits.", "Sixteen"]
    assert "<Eight bits.>" in text and text.isprintable() is False and "\ue000" not in text


def test_what_transformers_has_templates_have():
    source = "{{ bos_token }}{{ messages | tojson }}{{ tools[0] | tojson(indent=2) }}{{ strftime_now is defined }}"
    text, _ = template(source + "{% generation %}{% endgeneration %}").render(
        [{"role": "user", "content": "<é>"}], [{"b": 1, "a": 2}]
    )
    assert text == '<|endoftext|>[{"role": "user", "content": "<é>"}]{\n  "b": 1,\n  "a": 2\n}False'


CANNOT_BE_COMPILED = {
    "no end": "{% for m in messages %}",
    "unknown tag": "{% include_file 'a' %}",
    "unknown filter": "{{ messages | as_html }}",
    "deep nesting": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "deep blocks": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "no end of a generation": "{% generation %}",
}


@pytest.mark.parametrize("case", CANNOT_BE_COMPILED)
def test_a_template_that_is_none_is_one_sentence(case):
    with pytest.raises(
        ValueError, match=r"chat template of the tokenizer must be a template of Jinja, got .*; copy it"
    ) as e:
        template(CANNOT_BE_COMPILED[case])
    assert len(str(e.value).splitlines()) == 1 and len(str(e.value)) < 300


CANNOT_BE_RENDERED = {
    "attributes of Python": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__'"),
    "globals": ("{{ raise_exception.__globals__.keys() }}", "__globals__"),
    "another way": ("{{ ''['__class__']['__mro__'] }}", "__class__"),
    "by a filter": ("{{ (''|attr('__class__')).__mro__ }}", "__class__"),
    "in a format": ("{{ '{0.__class__.__mro__}'.format(1) }}", "__class__"),
    "a change of the messages": ("{{ messages.append(1) }}", "append"),
    "a file": ("{% include 'a' %}", "no loader"),
    "its own refusal": ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
    "arithmetic": ("{{ 1 // 0 }}", "division"),
    "endless text": ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "a text of more than 1,000,000"),
    "a large range": ("{% for i in range(10**9) %}{% endfor %}", "range"),
    "endless recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
}


@pytest.mark.parametrize("case", CANNOT_BE_RENDERED)
def test_a_template_reaches_nothing_but_its_text(case, monkeypatch):
    monkeypatch.setattr(chat_template, "MOST_TEXT", 1_000_000)
    source, words = CANNOT_BE_RENDERED[case]
    with pytest.raises(Unreadable) as raised:
        rendered = template("{% generation %}{% endgeneration %}" + source).render(MESSAGES)
        raise Unreadable(f"nothing was refused: {rendered.text[:200]!r}")
    assert words in str(raised.value) and len(str(raised.value).splitlines()) == 1


def test_answers_that_cannot_be_told_from_the_rest():
    """Templates of models that think drop their thoughts from earlier answers."""
    dropping = chats.PLAIN.replace(
        "message['content']", "message['content' if loop.last or message.role == 'user' else 'role']"
    )
    with pytest.raises(Unreadable, match="a text up to message 2 that is not how the text of all messages begins"):
        template(dropping).render(MESSAGES)
    assert len(template(dropping).render(MESSAGES[:2]).spans) == 1
