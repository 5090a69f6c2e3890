"""The example on several devices and in several processes: what a model must be, who reads what, who may begin."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import jax_fp8 as fp8

TENSOR = {"pipe": 1, "data": 1, "fsdp": 1, "tensor": 4}
MODEL = fp8.GPTConfig(vocab_size=256, num_layers=1, num_heads=8, hidden_size=256)


@pytest.mark.parametrize(
    ("changes", "fp8_head", "sentence"),
    [
        ({"num_heads": 2}, False, "tensor=4 must divide the 2 attention heads"),
        ({"num_heads": 24, "num_kv_heads": 6, "hidden_size": 384}, False, "divide the 6 key and value heads, or be a"),
        ({"num_kv_heads": 4, "num_heads": 32}, False, "the width of keys and values must be a multiple of 16"),
        ({"hidden_size": 96}, False, "--hidden-size must be a multiple of 16 on each of tensor=4 devices, got 96"),
        ({"mlp_hidden_size": 96}, False, "the width of the MLP must be a multiple of 16"),
        ({"vocab_size": 250}, False, "the vocabulary must be a multiple of 4 with tensor=4, got 250"),
        ({"vocab_size": 288}, True, "the vocabulary must be a multiple of 64 with tensor=4, got 288"),
    ],
)
def test_models_that_tensor_does_not_split(changes, fp8_head, sentence, example):
    mesh = example("mesh")
    model = dataclasses.replace(MODEL, **changes)
    with pytest.raises(ValueError) as raised:
        mesh.check_model(TENSOR, model, fp8_head)
    assert sentence in str(raised.value) and "\n" not in str(raised.value)
    mesh.check_model(TENSOR | {"tensor": 1}, model, fp8_head)


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 4}, {"num_kv_heads": 2}, {"vocab_size": 128, "num_heads": 4}])
def test_models_that_tensor_splits_train(changes, example):
    """What passes the checks of the example passes those of the library."""
    mesh = example("mesh")
    model = fp8.GPT(dataclasses.replace(MODEL, max_seq_len=16, **changes))
    mesh.check_model(TENSOR, model.config, False)
    made = mesh.make_mesh(TENSOR)
    step = fp8.make_train_step(fp8.next_token_loss(model), fp8.fused_adamw(1e-3), model.recipe, parallel=made)
    state = step.state_shapes(model.init, jax.random.key(0), np.zeros((2, 16), np.int32))
    step.trace(state, mesh.on_mesh(made, np.zeros((2, 17), np.int32)))


def test_a_mesh_has_its_axes_in_one_order(example):
    """Devices of `tensor` are neighbours, however the axes are written."""
    mesh = example("mesh")
    made = mesh.make_mesh(mesh.parse_axes(" tensor=2, data=4"))
    assert dict(made.shape) == {"pipe": 1, "data": 4, "fsdp": 1, "tensor": 2}
    ids = np.vectorize(lambda device: device.id)(made.devices)
    assert (ids == np.arange(8).reshape(1, 4, 1, 2)).all()


def test_several_processes_have_all_devices(example, monkeypatch):
    mesh = example("mesh")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"must have all 8 devices of the 2 processes, got data=4; say data=8"):
        mesh.make_mesh(mesh.parse_axes("data=4"))
    assert mesh.make_mesh(mesh.parse_axes("data=4,tensor=2")).size == 8


class OfTwo:
    """A sharding as the second of two processes sees it: the last four of eight devices are its own."""

    def __init__(self, sharding):
        self.sharding = sharding

    def addressable_devices_indices_map(self, shape):
        everything = self.sharding.devices_indices_map(shape)
        return {device: index for device, index in everything.items() if device.id >= 4}


@pytest.mark.parametrize(
    ("axes", "rows"),
    [("data=8", range(8, 16)), ("data=2,fsdp=2,tensor=2", range(8, 16)), ("fsdp=2,tensor=4", range(8, 16)),
     ("data=1,tensor=8", range(16)), ("pipe=2,data=4", range(16)), ("pipe=4,data=2", range(16))],
)  # fmt: skip
def test_each_process_reads_its_own_rows(axes, rows, example, monkeypatch):
    mesh, text = example("mesh"), example("text")
    made = mesh.make_mesh(mesh.parse_axes(axes))
    assert list(mesh.own_rows(made, 16)) == list(range(16))  # one process has all
    by_sequence = mesh._by_sequence
    monkeypatch.setattr(mesh, "_by_sequence", lambda *given: OfTwo(by_sequence(*given)))
    own = mesh.own_rows(made, 16)
    assert list(own) == list(rows)
    tokens = np.arange(1000) % 251
    assert (text.training_batch(tokens, 3, 0, 16, 8, own) == text.training_batch(tokens, 3, 0, 16, 8)[own]).all()
    validation = text.validation_batches(tokens, 4, 16, 8)
    assert (text.validation_batches(tokens, 4, 16, 8, own) == validation[:, own]).all()


@pytest.fixture
def second_of_two(example, monkeypatch):
    """`agree` of the second process, beside a first one that says what it is given."""
    processes = example("processes")
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)

    def agree(first, *own):
        def both(mine):
            return np.stack([np.frombuffer(first, np.uint8), mine])

        monkeypatch.setattr(processes.multihost_utils, "process_allgather", both)
        return processes.agree(*own)

    return processes, agree


def test_processes_begin_together_or_not_at_all(second_of_two):
    processes, agree = second_of_two
    ours, others = processes.fingerprint(b"settings", b"text"), processes.fingerprint(b"settings", b"another text")
    assert ours != others and processes.fingerprint(b"ab", b"c") != processes.fingerprint(b"a", b"bc")
    assert agree(ours, ours) is None
    assert agree(ours) is None  # says that this one cannot run: its own complaint is said already
    with pytest.raises(ValueError, match=r"those of process 0 differ; give all of them the same --data"):
        agree(others, ours)
    with pytest.raises(ValueError, match=r"process 0 is not, and says why"):
        agree(processes.CANNOT, ours)


def test_a_run_that_the_others_do_not_begin_leaves_no_folder(
    second_of_two, example, book, tmp_path, capsys, monkeypatch
):
    (processes, agree), script = second_of_two, example("train_gpt")
    monkeypatch.setattr(script, "agree", lambda *own: agree(processes.CANNOT, *own))
    small = "--num-layers 1 --hidden-size 32 --num-heads 2 --batch-size 4 --seq-len 16".split()
    assert script.main([*small, "--data", str(book), "--output", str(tmp_path / "runs")]) == 2
    assert "process 0 is not, and says why" in capsys.readouterr().err
    assert not list((tmp_path / "runs").iterdir())


def test_what_processes_are_told(example, monkeypatch):
    """To jax's own function; nothing of it for a run of one process."""
    processes, settings = example("processes"), example("settings")
    told = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments: told.append(arguments))
    processes.start(settings.parse([]))
    processes.start(settings.parse(["--distributed"]))
    processes.start(settings.parse("--coordinator localhost:1234 --num-processes 2 --process-id 1".split()))
    assert told == [(), ("localhost:1234", 2, 1)]


def test_only_the_first_process_writes(example, tmp_path, capsys):
    record, progress, logbook, watch = (example(name) for name in ("record", "progress", "logbook", "watch"))
    speed = example("speed").Speed(1.0, 1, None, jax.devices()[0])

    def run(name, is_written):
        folder = record.Folder(tmp_path, name, 10, is_written)
        folder.write_config({})
        folder.write_tokenizer("")
        with logbook.Logbook(folder, "delayed", True) as log:
            looks = watch.Watch(log, example("settings").Settings())
            with progress.Progress(log, 2, 16, speed, looks) as shown:
                for step in (1, 2):
                    looks.options(step)
                    shown.add(step, {"loss": np.float32(1.0), "skipped": step == 1}, np.float32(2.0))
        folder.plot("title")
        return folder

    assert run("mine", False).rows and not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")
    written = sorted(path.name for path in run("mine", True).path.iterdir())  # negative control
    assert written == ["config.json", "events.jsonl", "loss.png", "metrics.jsonl", "tensorboard", "tokenizer.json"]
    assert "step 1 of delayed was skipped" in capsys.readouterr().out


# --- pipelines --------------------------------------------------------------------------------------------------------

STAGES = "--num-layers 2 --hidden-size 32 --num-heads 2 --batch-size 4 --microbatches 2 --seq-len 16".split()
STAGES += ["--mesh", "pipe=2"]


def test_what_a_step_is_told_of_a_pipeline(example, book):
    script = example("train_gpt")

    def told(*flags):
        return example("job").parallelism(script.prepare(script.read_settings([*STAGES, "--data", str(book), *flags])))

    assert dict(told().mesh.shape) == {"pipe": 2, "data": 1, "fsdp": 1, "tensor": 1}
    assert (told().schedule, told().chunks) == ("1f1b", 1)
    chosen = told("--schedule", "interleaved", "--chunks", "3", "--num-layers", "6")
    assert (chosen.schedule, chosen.chunks) == ("interleaved", 3)


@pytest.mark.slow
def test_a_run_on_stages_is_a_run_on_one_device(example, book, tmp_path):
    def run(name, *flags):
        given = ["--data", str(book), "--recipe", "bf16", "--steps", "4", "--eval-every", "2", "--sample-tokens", "0"]
        assert example("train_gpt").main([*STAGES, *given, "--output", str(tmp_path), "--name", name, *flags]) == 0
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert (tmp_path / name / "loss.png").stat().st_size > 10_000
        return np.array([row["val_loss"] for row in rows])

    alone = run("alone", "--mesh", "data=1")
    np.testing.assert_allclose(run("stages"), alone, rtol=1e-4)
    assert np.abs(np.diff(alone)).min() > 1e-3  # negative control: one step more is not as close


def test_validation_and_sample_where_pipe_splits_params(example):
    evaluation, mesh = example("evaluation"), example("mesh")
    sizes = {"num_layers": 2, "max_seq_len": 16, "hidden_size": 64}
    model = fp8.GPT(fp8.GPTConfig.preset("tiny", tie_embeddings=False, **sizes))
    loss_fn, tokens = fp8.next_token_loss(model), np.random.default_rng(0).integers(0, 256, (2, 4, 17), np.int32)
    sizes = mesh.parse_axes("pipe=2,tensor=2")

    def evaluate(sizes, seed):
        made = mesh.make_mesh(sizes)
        step = fp8.make_train_step(loss_fn, fp8.fused_adamw(1e-3), model.recipe, 2, parallel=made)
        state = step.init_state(model.init, jax.random.key(seed), jax.ShapeDtypeStruct((4, 16), np.int32))
        kernel = state.params["layer_1"]["mlp"]["up"]["kernel"]
        assert kernel.addressable_shards[0].data.size == kernel.size // made.size
        # So large that logits count beside the noise that tokens are drawn with.
        variables = {**state.variables, "params": {**state.params, "head": 20 * state.params["head"]}}
        loss = evaluation.make_validation(loss_fn)(variables, mesh.on_mesh(made, tokens))
        return float(loss), evaluation.write(model, variables, tokens[0, 0, :16], 12, seed=0)

    (loss, text), (loss_alone, text_alone), (loss_other, text_other) = (
        evaluate(sizes, 0), evaluate(mesh.parse_axes("data=1"), 0), evaluate(sizes, 1)
    )  # fmt: skip
    assert loss == pytest.approx(loss_alone, rel=1e-5)
    assert (text == text_alone).all()
    assert loss_other != pytest.approx(loss_alone, rel=1e-3) and (text_other != text_alone).any()


@pytest.mark.parametrize("remat", ["offload", "offload:9", "offload:-1", "some", "full:2", ""])
def test_what_layers_cannot_keep(example, remat):
    settings = example("settings")
    defaults = settings.defaults("tiny")
    for right in ("none", "norms", "full", "offload:0", "offload:4"):
        settings.check(dataclasses.replace(defaults, remat=right))
    with pytest.raises(ValueError, match=r"--remat must be none, norms, full, or offload:N with N of 4 layers, got"):
        settings.check(dataclasses.replace(defaults, remat=remat))


def test_what_layers_keep_is_the_models(example):
    script, settings = example("train_gpt"), example("settings")
    chosen = dataclasses.replace(settings.defaults("tiny"), remat="offload:2", mesh="pipe=2", microbatches=2)
    config = fp8.GPTConfig.preset("tiny")
    assert {script.make_model(chosen, config, recipe).remat for recipe in ("bf16", "delayed", "current")} == {
        "offload:2"
    }
    with pytest.raises(
        ValueError, match=r"keep on their device, got --remat offload:2 and --mesh pipe=2; take another"
    ):
        example("mesh").check_stages(2, chosen)
