"""Folders of Hugging Face that a stranger has made: what leads out of them, what has no end, what asks for too much."""

import collections
import functools
import json
import os
import random as randomness
import time

import hostile_files
import huggingface as oracle
import pytest

import jax_fp8 as fp8
from jax_fp8.models.huggingface import layouts, weights

pytestmark = pytest.mark.versions
pytest.importorskip("safetensors.numpy")


@pytest.fixture
def folder_of(tmp_path):
    def write(case, parts=1, **changes):
        described = oracle.CASES[case]
        return oracle.write_folder(tmp_path / "theirs", described | changes, oracle.random_tensors(described), parts)

    return write


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ("../theirs/model-00001-of-00003.safetensors", "must name files of its own folder, got '../theirs/model-0"),
        ("/etc/hostname", "must name files of its own folder, got '/etc/hostname'"),
        ("sub/model.safetensors", "must name files of its own folder, got 'sub/model.safetensors'"),
        ("..", "must name files of its own folder, got '..'"),
        ("", "must name files of its own folder, got ''"),
        ("a\nb", r"must name files of its own folder, got 'a\\nb'"),
        ("n" * 10**6, r"must name files of its own folder, got 'nnn.*\.\.\.; copy it again"),
        (["model-00001-of-00003.safetensors"], r"must name files of its own folder, got \['model-00001"),
        (5, "must name files of its own folder, got 5; copy it again"),
        (None, "must name files of its own folder, got None; copy it again"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_index_that_leads_elsewhere(names, sentence, folder_of):
    """Though the first of them is there, and has tensors of this model."""
    folder = folder_of("llama", parts=3)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    fp8.load_huggingface(folder)
    first = next(iter(index["weight_map"]))
    path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {first: names}}))
    with pytest.raises(ValueError, match=sentence) as raised:
        fp8.load_huggingface(folder)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400
    path.write_text(json.dumps(index | {"weight_map": [names]}))
    with pytest.raises(ValueError, match="must have an object weight_map, got "):
        fp8.load_huggingface(folder)


def test_a_folder_of_links_is_read(folder_of, tmp_path):
    """As the cache of Hugging Face has them: names that lead to files of a folder beside."""
    folder = folder_of("llama", parts=3)
    (tmp_path / "snapshot").mkdir()
    for file in folder.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    config, _ = fp8.load_huggingface(tmp_path / "snapshot")
    assert config == fp8.load_huggingface(folder)[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"num_hidden_layers": 3000},
            "must have all tensors of its config.json, at least 3,000 for 3,000 layers, got ",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers in .* must be at most 4,096"),
    ],
)
def test_more_layers_than_tensors_are_refused_before_they_are_listed(changes, sentence, folder_of, monkeypatch):
    monkeypatch.setattr(weights, "entries_of", lambda config: pytest.fail("nothing may be listed"))
    with pytest.raises(ValueError, match=sentence):
        fp8.load_huggingface(folder_of("llama", **changes))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_settings_that_are_no_file(name, folder_of):
    folder = folder_of("llama", parts=3)
    for make, arrived in (
        (os.mkfifo, "a pipe"),
        (os.mkdir, "a folder"),
        (lambda path: os.symlink("/dev/zero", path), "a device"),
        (lambda path: path.write_bytes(b" " * (2**26 + 1)), "67,108,865 bytes, of which at most"),
    ):
        (folder / name).unlink()
        make(folder / name)
        with pytest.raises(ValueError, match=f"{name} must be a file with one JSON object, got {arrived}"):
            fp8.load_huggingface(folder)
        os.rmdir(folder / name) if arrived == "a folder" else None
        (folder / name).touch()
    with pytest.raises(ValueError, match="must be a folder, or a file in it, but there is none at nnn"):
        fp8.load_huggingface("n" * 5000)


@pytest.mark.parametrize("case", ["llama 3.1", "mixtral", "gpt2"])
def test_mutated_folders_are_read_or_refused_in_one_sentence(case, folder_of, monkeypatch):
    """Seeded, so that what is found is found again. Some mutations are harmless, and most must not be."""
    folder, random, outcomes = folder_of(case, parts=2), randomness.Random(case), collections.Counter()
    monkeypatch.setattr(layouts, "_shapes", functools.cache(layouts._shapes))
    good = {file.name: file.read_bytes() for file in folder.iterdir()}
    fp8.load_huggingface(folder)
    for number in range(150):
        name = random.choice(list(good))
        mutated = hostile_files.mutate_json(good[name].decode(), random) if name.endswith(".json") else None
        (folder / name).write_bytes(mutated or hostile_files.mutate_bytes(good[name], random))
        began = time.monotonic()
        try:
            fp8.load_huggingface(folder)
            outcomes["read"] += 1
        except ValueError as error:
            assert type(error) is ValueError and "\n" not in str(error) and len(str(error)) < 800, (number, error)
            outcomes[name] += 1
        assert time.monotonic() - began < 5, (number, mutated)
        (folder / name).write_bytes(good[name])
    assert min(outcomes[name] for name in good) >= 10 and outcomes["read"] < 75, outcomes
