"""Notes of a checkpoint: what a run writes is read, and what is damaged is told in one sentence by all who read it."""

import json
import math

import pytest

import jax_fp8 as fp8
from jax_fp8 import cli
from jax_fp8.report.run_format import OF_A_MODEL, OF_A_RUN, CannotResume
from jax_fp8.run import resuming, settings
from jax_fp8.run.checkpoints import read_last, steps_in

STEP = 8


@pytest.fixture
def good():
    """Notes as a run writes them, at the end of step 8."""
    model = fp8.GPTConfig.preset("tiny")
    described = resuming.describe_run(settings.defaults("tiny"), model, "bytes", "0123456789abcdef")
    arrays = {"params": {"['kernel']": ["float32", [4, 8], 77]}, "opt_state": {".count": ["int32", [], 8]}}
    logs = {"rows": {"delayed": 3}, "other_rows": {"diagnostics": {"delayed": 1}, "events": {}}}
    progress = {"losses": [5.5, 5.25], "val_loss": math.nan, "spikes": {"losses": [[7, 5.5], [8, 5.25]], "skipped": 0}}
    return described | logs | progress | {"step": STEP, "arrays": arrays}


@pytest.fixture
def run(good, tmp_path):
    """The folder of a run whose last checkpoint is that of step 8; its notes can be written anew."""

    def write(text, step=STEP):
        folder = tmp_path / "runs/mine/checkpoints" / str(step) / "notes"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metadata").write_bytes(text if isinstance(text, bytes) else json.dumps(text).encode())
        return tmp_path / "runs/mine"

    write(good)
    return write


def without(name):
    return lambda notes: {other: value for other, value in notes.items() if other != name}


def changed(path, value):
    """With another value where these names lead."""

    def change(notes):
        *parents, last = path.split(".")
        notes = json.loads(json.dumps(notes))
        inside = notes
        for name in parents:
            inside = inside[name]
        inside[last] = value
        return notes

    return change


MISSING = ("step", "settings", "model", "tokenizer", "text", "rows", "arrays", "losses", "val_loss")
WRONG = [
    *((path, value) for path in MISSING for value in (None, True, ["a", 2], "x" * 10**5) if (path, value) not in (
        ("tokenizer", "x" * 10**5), ("text", "x" * 10**5))),
    ("step", -5), ("step", 8.5), ("step", 9), ("step", 10**400), ("step", "8"),
    ("settings", {}), ("settings.recipe", "fp4"), ("settings.recipe", ["delayed"]), ("settings.tokenizer", 7),
    ("settings.vocab_size", "300"), ("settings.fast", 1), ("settings.steps", 2.5), ("settings.learning_rate", "low"),
    ("settings.learning_rate", 10**400), ("settings.output", 3),
    ("model", {}), ("model.num_layers", 10**9), ("model.hidden_size", "128"), ("model.norm", ["a"]),
    ("model.rotary_scaling", 5), ("model.unknown", 1),
    ("rows.delayed", -1), ("rows.delayed", 1.5), ("other_rows", []), ("other_rows.events", {"delayed": "3"}),
    ("losses", [None]), ("losses", [10**400]), ("spikes", []), ("spikes.losses", [7]), ("spikes.losses", [[7, 5.5, 1]]),
    ("spikes.skipped", None), ("arrays.params", []), ("arrays.params", {"['kernel']": ["float32", [4, 8]]}),
    ("arrays.params", {"['kernel']": ["float32", 32, 77]}), ("arrays.params", {"['kernel']": [3, [4, 8], 77]}),
]  # fmt: skip
CHANGES = {
    **{f"without {name}": without(name) for name in MISSING},
    **{f"{path}={str(value)[:20]}-{type(value).__name__}": changed(path, value) for path, value in WRONG},
    "empty": lambda notes: b"",
    "half": lambda notes: json.dumps(notes).encode()[:500],
    "binary": lambda notes: b"\xff\x00\x01",
    "a list": lambda notes: [notes],
    "nested": lambda notes: b'{"step":' * 10**5,
    "a name twice": lambda notes: b'{"step": 8, ' + json.dumps(notes).encode()[1:],
}


@pytest.mark.parametrize("change", CHANGES)
def test_notes_that_are_damaged(change, good, run):
    folder = run(good) / "checkpoints"
    assert read_last(folder, OF_A_RUN)["model"] == good["model"]
    run(CHANGES[change](good))
    with pytest.raises(CannotResume) as raised:
        read_last(folder, OF_A_RUN)
    sentence = str(raised.value)
    assert sentence.startswith(f"the checkpoint {folder / '8'} must be as it was saved, got ")
    assert sentence.endswith("; there is no other, so begin a new run") and "\n" not in sentence and len(sentence) < 400
    run(good, step=4)  # not looked at
    with pytest.raises(CannotResume, match=r"; remove it, and --resume continues from step 4$"):
        read_last(folder, OF_A_RUN)


def test_notes_of_older_runs(good, run):
    """Which had fewer settings, fields of a model and logs; a model that writes needs less of them than a run."""
    old = without("spikes")(without("other_rows")(good))
    old["settings"] = {name: good["settings"][name] for name in ("preset", "recipe", "tokenizer", "vocab_size")}
    old["model"] = {name: value for name, value in good["model"].items() if name not in ("qk_norm", "head_dim")}
    assert read_last(run(old) / "checkpoints", OF_A_RUN)["settings"] == old["settings"]
    less = without("rows")(without("losses")(old))
    assert read_last(run(less) / "checkpoints", OF_A_MODEL)["step"] == STEP
    with pytest.raises(CannotResume, match="notes without rows"):
        read_last(run(less) / "checkpoints", OF_A_RUN)


@pytest.mark.parametrize("change", ["without settings", "without model", "step=True-bool", "settings.recipe=fp4-str"])
def test_all_programs_say_it_in_one_sentence(change, good, run, book, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(CHANGES[change](good))
    calls = {
        "train": ["--data", str(book), "--output", "runs", "--resume", "mine"],
        "generate": ["mine", "--prompt", "a"],
        "export": ["mine", "--to", "mine.safetensors"],
    }
    for program, arguments in calls.items():
        assert cli.main([program, *arguments]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(
            f"python -m jax_fp8 {program}: the checkpoint runs/mine/checkpoints/8 must be as it was saved, got "
        )
    assert not (tmp_path / "mine.safetensors").exists()


def test_what_is_no_file_of_notes(good, run):
    folder = run(good) / "checkpoints"
    (folder / "8/notes/metadata").unlink()
    (folder / "8/notes/metadata").symlink_to("/dev/zero")
    with pytest.raises(CannotResume, match="got a device; there is no other, so begin a new run"):
        read_last(folder)
    for name in ("007", "\u0669", "1_0"):
        (folder / name).mkdir()
    assert steps_in(folder) == [8]
