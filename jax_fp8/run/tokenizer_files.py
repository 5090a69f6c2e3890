"""The files of a tokenizer beside its tokenizer.json: which there are, what they say, and how a model takes them along.

    tokenizer_config.json     its tokens that begin and end a text, and in most folders its chat template
    chat_template.jinja       the chat template, in newer folders
    special_tokens_map.json   the tokens that begin and end a text, in older folders

A run keeps a copy, and so does every model that is made of it. `transformers` needs them, too. They are files of
strangers.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jax_fp8.core.files import Unreadable, parse_json, read_bytes, shown, write_bytes
from jax_fp8.report.run_format import TOKENIZER

SETTINGS, TEMPLATE, SPECIAL = "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"
# Names of all files that belong to a model's tokenizer: slow tokenizers of `transformers` need the last ones.
BESIDE = (SETTINGS, TEMPLATE, SPECIAL, "added_tokens.json", "generation_config.json", "vocab.json", "merges.txt",
          "tokenizer.model")  # fmt: skip
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
MOST_TEMPLATE = 2**18  # characters
# What `transformers` needs beside a tokenizer.json to make a tokenizer of it, whatever the model is.
OWN_SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast"}


@dataclass(frozen=True)
class Beside:
    """What the files beside a tokenizer.json say.

    Args:
      special: the special tokens by their names, such as "eos_token".
      template: the chat template, in Jinja; None where there is none.
      files: their contents by name.
    """

    special: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


def read_beside(folder: Path, remedy: str) -> Beside:
    """What the files in this folder say.

    Args:
      remedy: what the user can do if a file cannot be used; the end of the ValueError's sentence.
    """
    files = _contents(folder, BESIDE, remedy)
    described: dict[str, dict] = {}
    for name in (SPECIAL, SETTINGS):
        try:
            described[name] = parse_json(files[name]) if name in files else {}
        except Unreadable as error:
            raise ValueError(f"{folder / name} must be a JSON object, got {error}; {remedy}") from None
    try:
        special = _special_tokens(described[SPECIAL]) | _special_tokens(described[SETTINGS])
        return Beside(special, _template(files.get(TEMPLATE), described[SETTINGS].get("chat_template")), files)
    except Unreadable as error:
        raise ValueError(f"the files of the tokenizer in {folder} must fit together, got {error}; {remedy}") from None


def write_tokenizer(folder: Path, files: Mapping[str, bytes], is_for_transformers: bool = False) -> list[str]:
    """Write the files of a tokenizer to a folder, those that are not there yet. Returns the names of those written."""
    if is_for_transformers and TOKENIZER in files and SETTINGS not in files:
        files = {**files, SETTINGS: (json.dumps(OWN_SETTINGS, indent=2) + "\n").encode()}
    new = [name for name in files if not os.path.lexists(folder / name)]
    for name in new:
        write_bytes(folder / name, files[name])
    return new


def check_no_other(folder: Path, files: Mapping[str, bytes]) -> None:
    """Raise if the folder has a file of another model's tokenizer: writing this model's would overwrite it; keeping it
    would give this model the wrong one.
    """
    for name in (TOKENIZER, *BESIDE):
        if not os.path.lexists(folder / name) or not (files or name == TOKENIZER):
            continue
        try:
            is_own = read_bytes(folder / name) == files.get(name)
        except Unreadable:
            is_own = False
        if not is_own:
            raise ValueError(
                f"--to must be in a folder without another model's {name}, got {folder / name}; choose another"
            )


def has_tokenizer(folder: Path) -> bool:
    return os.path.isfile(folder / TOKENIZER)


def copied_files(folder: Path) -> dict[str, bytes]:
    """The contents of all files of a tokenizer in a folder, by name; those that cannot be read are a ValueError."""
    return _contents(folder, (TOKENIZER, *BESIDE), "copy it again")


def _contents(folder: Path, names: Iterable[str], remedy: str) -> dict[str, bytes]:
    """The contents of the files of these names that are there; `remedy` as in `read_beside`."""
    files = {}
    for name in names:
        if not os.path.lexists(folder / name):
            continue
        try:
            files[name] = read_bytes(folder / name)
        except Unreadable as error:
            raise ValueError(f"{folder / name} must be a file of a tokenizer, got {error}; {remedy}") from None
    return files


def _special_tokens(described: Mapping[str, object]) -> dict[str, str]:
    """The special tokens by name; a token is a text, or an object with its text as "content"."""
    found = {}
    for name in SPECIAL_TOKENS:
        token = described.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            continue
        if not isinstance(token, str):
            raise Unreadable(f"{shown(token)} as {name}")
        found[name] = token
    return found


def _template(file: bytes | None, described: object) -> str | None:
    """The chat template: that of the file of its own, or else that of tokenizer_config.json, which is a text, or a list
    of several with names.
    """
    if file is not None:
        try:
            template: object = file.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise Unreadable(f"bytes that are not UTF-8 in {TEMPLATE}") from None
    elif isinstance(described, list):
        named = [one for one in described if isinstance(one, dict) and one.get("name") == "default"]
        template = named[0].get("template") if named else None
    else:
        template = described
    if template is not None and not isinstance(template, str):
        raise Unreadable(f"{shown(template)} as its chat template")
    if template is not None and len(template) > MOST_TEMPLATE:
        raise Unreadable(
            f"a chat template of {len(template):,} characters, of which at most {MOST_TEMPLATE:,} are read"
        )
    return template
