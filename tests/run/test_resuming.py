"""Runs that continue, as if never interrupted: on another mesh, in another recipe; and which run that is."""

import dataclasses
import json
import os
import shutil
import signal
import time

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jax_fp8.models.config import GPTConfig
from jax_fp8.report.run_format import CannotResume
from jax_fp8.run import batches as batching
from jax_fp8.run import resuming, spikes, train
from jax_fp8.run.checkpoints import read_last
from jax_fp8.run.settings import Settings
from jax_fp8.train.step import TrainStep

SMALL = "--num-layers 1 --hidden-size 32 --num-heads 2 --batch-size 4 --seq-len 16 --sample-tokens 0".split()
SMALL += "--steps 6 --eval-every 4 --checkpoint-every 2".split()


class Runs:
    """Runs with the same options, in one folder of runs."""

    def __init__(self, book, output, monkeypatch):
        self.output = output
        self._read = read_last
        self._options = [*SMALL, "--data", str(book), "--output", str(output)]
        self._monkeypatch, self._batch = monkeypatch, batching.training_batch

    def __call__(self, *options, stop=None, number=signal.SIGINT, at=(None, None)):
        """The exit status; with `stop`, a signal while the batch of that step is made; `at` a step, do something."""

        def training_batch(tokens, step, *others):
            if step == stop:
                os.kill(os.getpid(), number)
            if step == at[0]:
                at[1]()
            return self._batch(tokens, step, *others)

        self._monkeypatch.setattr(batching, "training_batch", training_batch)
        return train.main([*self._options, *options])

    def losses(self, name):
        rows = map(json.loads, (self.output / name / "metrics.jsonl").read_text().splitlines())
        return [(row["run"], row["step"], row["loss"], row["val_loss"]) for row in rows]

    def events(self, name):
        rows = map(json.loads, (self.output / name / "events.jsonl").read_text().splitlines())
        return [(row["step"], row["event"], row["loss"], row["limit"]) for row in rows]

    def last(self, name, folder="checkpoints"):
        notes = self._read(self.output / name / folder)
        return notes["step"], notes["arrays"]


@pytest.fixture
def runs(book, tmp_path, monkeypatch):
    return Runs(book, tmp_path / "runs", monkeypatch)


def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(runs, capfd, monkeypatch):
    """With steps that are diagnosed, and a last one that is skipped, for its loss is not far below those before."""
    monkeypatch.setattr(spikes, "WARM_UP", 1)
    monkeypatch.setattr(spikes, "FACTOR", -3)
    options = ["--diagnose-every", "2", "--skip-spikes", "--tensorboard"]
    assert runs("--name", "whole", *options) == 0
    assert runs("--name", "mine", *options, stop=5) == 130
    assert sorted(path.name for path in (runs.output / "mine/checkpoints").iterdir()) == ["4", "5"]
    said = capfd.readouterr().err.splitlines()
    assert "ends after this step; once more, and it ends at once" in said
    sentence = "the same command with --resume mine continues after step 5"
    assert said[-1].endswith(f"are in {runs.output / 'mine'}; {sentence}")
    assert (runs.output / "mine/loss.png").read_bytes().startswith(b"\x89PNG")
    assert [row[1] for row in runs.losses("mine")] == [0, 4, 5]
    before = json.loads((runs.output / "mine/checkpoints/4/notes/metadata").read_text())["arrays"]
    assert runs.last("mine")[1]["params"] != before["params"]
    at_five, config = runs.last("mine")[1], (runs.output / "mine/config.json").read_bytes()
    for name in ("metrics", "diagnostics", "events"):
        with (runs.output / f"mine/{name}.jsonl").open("a") as log:
            log.write('{"run": "delayed", "step": 6, "loss": 1}\n{"run": "delayed", "lo')  # killed in a line
    assert runs("--name", "mine", *options, "--resume", "auto") == 0
    assert "mine continues after step 5\n" in capfd.readouterr().out
    assert runs.losses("mine") == runs.losses("whole")
    assert [row[1] for row in runs.losses("mine")] == [0, 4, 6]
    assert runs.last("mine") == runs.last("whole")
    assert runs.last("mine")[0] == 6 and {"params", "opt_state", "fp8"} == set(runs.last("mine")[1])
    assert (runs.output / "mine/config.json").read_bytes() == config
    mine, whole = ((runs.output / name / "diagnostics.jsonl").read_text() for name in ("mine", "whole"))
    assert mine == whole and [json.loads(line)["step"] for line in mine.splitlines()] == [2, 4, 6]
    assert runs.events("mine") == runs.events("whole")
    ((step, event, loss, limit),) = runs.events("mine")
    assert (step, event) == (6, "skipped") and loss > limit > 5
    changed = [name for name, arrays in runs.last("mine")[1].items() if arrays != at_five[name]]
    assert changed == []  # by the step that was skipped


def test_a_run_with_dropout_goes_on_with_its_masks(runs):
    """As one that was not interrupted."""
    dropped = ["--dropout", "0.2", "--recipe", "current"]
    assert runs("--name", "whole", *dropped) == 0
    assert runs("--name", "mine", *dropped, stop=3) == 130
    assert runs("--resume", "mine", *dropped) == 0
    assert runs.last("mine") == runs.last("whole") and runs.losses("mine") == runs.losses("whole")


@pytest.mark.slow  # what is said of any setting that is another: test_what_may_change_is_named
def test_a_run_goes_on_with_other_dropout(runs, capfd):
    assert runs("--name", "mine", "--recipe", "current", "--dropout", "0.2", stop=3) == 130
    assert runs("--resume", "mine", "--recipe", "current") == 0
    assert "--dropout 0.0 (was 0.2)" in capfd.readouterr().out


ON_MESHES = [pytest.param(*case, marks=pytest.mark.slow) for case in (("bf16", "data=2"), ("delayed", "fsdp=2"))]


@pytest.mark.parametrize(("recipe", "mesh"), [("bf16", "data=1"), *ON_MESHES])
def test_a_run_goes_on_in_another_recipe_and_on_another_mesh(recipe, mesh, runs, monkeypatch, capfd):
    """From bfloat16 to FP8 with scales from the first batch, as before the first step of a run."""
    step_class = TrainStep
    warm_start, warmed = step_class.warm_start, []

    def watched(step, state, batch):
        warmed.append(int(state.step))
        state = warm_start(step, state, batch)
        named = jax.tree_util.tree_leaves_with_path(state.fp8)
        histories = [leaf for path, leaf in named if "history" in str(path)]
        assert histories and all((history.max(-1) > 0).all() for history in histories)
        return state

    monkeypatch.setattr(step_class, "warm_start", watched)
    other = {"bf16": "delayed", "delayed": "bf16"}[recipe]
    assert runs("--name", "mine", "--recipe", recipe, stop=3, number=signal.SIGTERM) == 143
    assert runs("--resume", "mine", "--recipe", other, "--mesh", mesh) == 0
    assert f"changed: --recipe {other} (was {recipe})" in capfd.readouterr().out
    assert warmed == ([3] if other == "delayed" else [])
    losses = runs.losses("mine")
    assert [row[:2] for row in losses] == [(recipe, 0), (other, 4), (other, 6)]
    assert losses[0][3] > losses[1][3] > losses[2][3]


@pytest.fixture
def keeps_no_programs():
    """Or jax would write what it compiles, too, where files may not grow."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether there is one is asked once
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def test_a_disk_that_fills_ends_the_run_with_one_sentence(runs, capfd, keeps_no_programs):
    """After the checkpoint of step 2: files may then grow to 4 KiB, which the log does not need and an array does."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = runs.output / "mine/checkpoints"

    def limit():
        while not (folder / "2").exists():  # it is written beside training
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, before[1]))

    try:
        assert runs("--name", "mine", "--recipe", "bf16", at=(3, limit)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capfd.readouterr().err.splitlines()[-1]
    assert said == (
        f"python -m jax_fp8 train: a checkpoint must be written to {folder}, got File too large; "
        "the checkpoint of step 2 is complete, --resume continues from it"
    )
    assert [path.name for path in folder.iterdir()] == ["2"]
    assert runs("--name", "mine", "--recipe", "bf16", "--resume", "auto") == 0
    assert [row[1] for row in runs.losses("mine")] == [0, 4, 6]


@pytest.mark.slow
def test_both_runs_of_a_comparison_go_on(runs):
    """From where the second one was interrupted; the first one is not trained again."""
    options = ["--recipe", "current", "--compare"]
    assert runs("--name", "whole", *options) == 0
    shutil.copytree(runs.output / "whole", runs.output / "mine")
    shutil.rmtree(runs.output / "mine/checkpoints-baseline/6")
    assert runs("--name", "mine", *options, "--resume", "auto", stop=5) == 130  # only the second has a step 5 to do
    assert [row[:2] for row in runs.losses("mine")][-2:] == [("bf16", 4), ("bf16", 5)]
    assert runs("--name", "mine", *options, "--resume", "auto") == 0
    assert runs.losses("mine") == runs.losses("whole")
    for folder in ("checkpoints", "checkpoints-baseline"):
        assert runs.last("mine", folder) == runs.last("whole", folder)


# --- which run goes on ------------------------------------------------------------------------------------------------


def described(**changes):
    settings = dataclasses.replace(Settings(hidden_size=32, num_layers=1, num_heads=2), **changes)
    model = GPTConfig.preset(
        "tiny", **{name: getattr(settings, name) for name in ("hidden_size", "num_layers", "num_heads")},
        max_seq_len=settings.seq_len,
    )  # fmt: skip
    return resuming.describe_run(settings, model, settings.tokenizer, "text")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 64}, "--hidden-size must be 32 as in the checkpoint, got 64"),
        ({"num_layers": 2}, "--num-layers must be 1 as in the checkpoint, got 2"),
        ({"seq_len": 64}, "--seq-len must be 128 as in the checkpoint, got 64"),
        ({"fp8_attention": True}, "--fp8-attention must be False as in the checkpoint, got True"),
        ({"tokenizer": "bpe"}, "--tokenizer must be bytes as in the checkpoint, got bpe"),
        ({"steps": 11}, "--steps must be at least 12, the step of the checkpoint, got 11"),
        ({"compare": True, "recipe": "current"}, "--compare needs --recipe delayed from the first step on"),
    ],
)
def test_what_must_stay_as_it_was(changes, sentence):
    saved = described() | {"step": 12}
    resuming.check_same(saved, described())
    with pytest.raises(CannotResume) as raised:
        resuming.check_same(saved, described(**changes))
    assert sentence in str(raised.value) and "\n" not in str(raised.value)


def test_another_tokenizer_or_preset_of_the_same_size():
    bpe = described(tokenizer="bpe", vocab_size=300)
    with pytest.raises(ValueError, match=r"--vocab-size must be 300 as in the checkpoint, got 400"):
        resuming.check_same(bpe | {"step": 1}, described(tokenizer="bpe", vocab_size=400))
    with pytest.raises(ValueError, match=r"--data, from which bpe was learnt, must be text ab as in .* got text cd"):
        resuming.check_same(bpe | {"step": 1, "tokenizer": "ab"}, bpe | {"tokenizer": "cd"})
    other = bpe | {"model": bpe["model"] | {"positions": "rotary"}, "settings": bpe["settings"] | {"preset": "other"}}
    with pytest.raises(ValueError, match=r"--preset must be tiny as in the checkpoint, got other"):
        resuming.check_same(bpe | {"step": 1}, other)


def test_a_tokenizer_of_files_is_the_same_wherever_they_are():
    saved, now = described(tokenizer="here") | {"step": 1, "tokenizer": "ab"}, described(tokenizer="there")
    resuming.check_same(saved, now | {"tokenizer": "ab"})
    with pytest.raises(ValueError, match=r"--tokenizer must be the tokenizer ab as in .* got the tokenizer ef"):
        resuming.check_same(saved, now | {"tokenizer": "ef"})


def test_a_preset_that_has_changed_since():
    """A checkpoint has the fields that a model had when it was written."""
    run = described()
    then = {name: value for name, value in run["model"].items() if name not in ("rotary_base", "qk_norm")}
    resuming.check_same(run | {"model": then, "step": 1}, run)
    now = run | {"model": run["model"] | {"norm_epsilon": 1e-5}}
    with pytest.raises(ValueError, match="norm_epsilon of the model must be 1e-06 as in the checkpoint, got 1e-05"):
        resuming.check_same(run | {"model": then, "step": 1}, now)


def test_what_may_change_is_named():
    differences, saved = resuming.differences, described()
    assert differences(saved, saved) == ""
    now = described(mesh="data=2", learning_rate=1e-4, resume="x", keep=9, dropout=0.2) | {"text": "another"}
    changed = "--learning-rate 0.0001 (was 0.001), --dropout 0.2 (was 0.0), --mesh data=2 (was data=1)"
    assert differences(saved, now) == f"{changed}, another text"


def make_run(path, checkpoint=None, every=None, log=True):
    path.mkdir(parents=True)
    if checkpoint is not None:
        (path / "checkpoints" / str(checkpoint)).mkdir(parents=True)
    if every is not None:
        (path / "config.json").write_text(json.dumps({"settings": {"checkpoint_every": every}}))
    if log:
        (path / "metrics.jsonl").write_text("")


def test_auto_finds_the_last_run_of_a_name_that_can_go_on(tmp_path):
    last_run = resuming._last_run
    assert last_run(tmp_path / "none", "mine") is None
    make_run(tmp_path / "mine", every=0)  # it is finished, and has nothing to go on from
    make_run(tmp_path / "mine-other", 4, every=4)
    assert last_run(tmp_path, "mine") is None
    make_run(tmp_path / "mine-2", every=4)  # ended before its first checkpoint
    assert last_run(tmp_path, "mine") == tmp_path / "mine-2"
    make_run(tmp_path / "mine-10", 4, every=4)
    make_run(tmp_path / "mine-3", 8, every=4)
    assert last_run(tmp_path, "mine") == tmp_path / "mine-10"
    make_run(tmp_path / "mine-11", log=False)  # killed before it wrote anything
    assert last_run(tmp_path, "mine") == tmp_path / "mine-11"


def test_a_configuration_that_is_cut_short_is_one_sentence(tmp_path):
    make_run(tmp_path / "mine", every=4)
    (tmp_path / "mine/config.json").write_text("{")
    with pytest.raises(CannotResume, match=r"config.json must be as it was written, got no JSON \("):
        resuming._last_run(tmp_path, "mine")


@pytest.mark.parametrize("settings", [[], 5, {"checkpoint_every": "4"}, {"checkpoint_every": -1}])
def test_a_configuration_of_other_types_is_one_sentence(settings, tmp_path):
    make_run(tmp_path / "mine", every=4)
    (tmp_path / "mine/config.json").write_text(json.dumps({"settings": settings}))
    with pytest.raises(CannotResume, match=r"config.json must be as it was written, got settings"):
        resuming._last_run(tmp_path, "mine")


def test_a_run_without_checkpoints_is_not_one_to_go_on_with(tmp_path):
    make_run(tmp_path / "mine", every=0)
    settings = dataclasses.replace(Settings(), output=tmp_path, resume="mine")
    with pytest.raises(
        ValueError, match=r"must name a run with checkpoints in .*, got 'mine'; --checkpoint-every saves checkpoints"
    ):
        resuming.locate_run(settings, "mine")
    make_run(tmp_path / "theirs", checkpoint=3)
    make_run(tmp_path / "ours", checkpoint=4)
    with pytest.raises(ValueError, match=r", got 'mine'; runs with checkpoints are ours, theirs$"):
        resuming.locate_run(settings, "mine")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--checkpoint-every", "-1"], "--checkpoint-every must be at least 0, got -1"),
        (["--keep", "0"], "--keep must be at least 1, got 0"),
        (["--resume", "nowhere"], "--resume must name a run with checkpoints in"),
    ],
)
def test_options_that_cannot_be(options, sentence, runs, capsys):
    assert runs(*options) == 2
    said = capsys.readouterr().err
    assert sentence in said and len(said.splitlines()) == 1
    assert not runs.output.exists()
