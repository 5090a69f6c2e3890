"""A run on several devices and in several processes: who reads what, who may begin, what a step is told."""

import json

import jax
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.run import batches, devices, folder, generate, logs, progress, settings, spikes, train


def test_a_mesh_has_its_axes_in_one_order():
    """Devices of `tensor` are neighbours, however the axes are written."""
    made = devices.make_mesh(" tensor=2, data=4")
    assert dict(made.shape) == {"pipe": 1, "data": 4, "fsdp": 1, "expert": 1, "tensor": 2}
    ids = np.vectorize(lambda device: device.id)(made.devices)
    assert (ids == np.arange(8).reshape(1, 4, 1, 1, 2)).all()


def test_several_processes_have_all_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"must have all 8 devices of the 2 processes, got data=4; say data=8"):
        devices.make_mesh("data=4")
    assert devices.make_mesh("data=4,tensor=2").size == 8


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
def test_each_process_reads_its_own_rows(axes, rows, monkeypatch):
    made = devices.make_mesh(axes)
    assert list(devices.own_rows(made, 16)) == list(range(16))  # one process has all
    by_sequence = devices._by_sequence
    monkeypatch.setattr(devices, "_by_sequence", lambda *given: OfTwo(by_sequence(*given)))
    own = devices.own_rows(made, 16)
    assert list(own) == list(rows)
    tokens = np.arange(1000) % 251
    assert (batches.training_batch(tokens, 3, 0, 16, 8, own) == batches.training_batch(tokens, 3, 0, 16, 8)[own]).all()
    validation = batches.validation_batches(tokens, 4, 16, 8)
    assert (batches.validation_batches(tokens, 4, 16, 8, own) == validation[:, own]).all()


@pytest.fixture
def second_of_two(monkeypatch):
    """`agree` of the second process, beside a first one that says what it is given."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)

    def agree(first, *own):
        def both(mine):
            return np.stack([np.frombuffer(first, np.uint8), mine])

        monkeypatch.setattr(devices.multihost_utils, "process_allgather", both)
        return devices.agree(*own)

    return agree


def test_processes_begin_together_or_not_at_all(second_of_two):
    agree = second_of_two
    ours, others = devices.fingerprint(b"settings", b"text"), devices.fingerprint(b"settings", b"another text")
    assert ours != others and devices.fingerprint(b"ab", b"c") != devices.fingerprint(b"a", b"bc")
    assert agree(ours, ours) is None
    assert agree(ours) is None  # says that this one cannot run: its own complaint is said already
    with pytest.raises(ValueError, match=r"those of process 0 differ; give all of them the same --data"):
        agree(others, ours)
    with pytest.raises(ValueError, match=r"process 0 is not; it prints the reason"):
        agree(devices.CANNOT, ours)


def test_a_run_that_the_others_do_not_begin_leaves_no_folder(second_of_two, book, tmp_path, capsys, monkeypatch):
    agree = second_of_two
    monkeypatch.setattr(train, "agree", lambda *own: agree(devices.CANNOT, *own))
    small = "--num-layers 1 --hidden-size 32 --num-heads 2 --batch-size 4 --seq-len 16".split()
    assert train.main([*small, "--data", str(book), "--output", str(tmp_path / "runs")]) == 2
    assert "process 0 is not; it prints the reason" in capsys.readouterr().err
    assert not list((tmp_path / "runs").iterdir())


def test_what_processes_are_told(monkeypatch):
    """To jax's own function; nothing of it for a run of one process."""
    told = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments: told.append(arguments))
    devices.start(settings.parse([]))
    devices.start(settings.parse(["--distributed"]))
    devices.start(settings.parse("--coordinator localhost:1234 --num-processes 2 --process-id 1".split()))
    assert told == [(), ("localhost:1234", 2, 1)]


def test_only_the_first_process_writes(tmp_path, capsys):
    speed = progress.Speed(1.0, 1, None, jax.devices()[0])

    def run(name, is_written):
        written = folder.Folder(tmp_path, name, 10, is_written)
        written.write_config({}, {}, {})
        written.write_tokenizer({"tokenizer.json": b""})
        with logs.Logbook(written, "delayed", True) as log:
            looks = spikes.Watch(log, settings.Settings())
            with progress.Progress(log, 2, 16, speed, looks) as shown:
                for step in (1, 2):
                    looks.options(step)
                    shown.add(step, {"loss": np.float32(1.0), "skipped": step == 1}, np.float32(2.0))
        written.plot("title")
        return written

    assert run("mine", False).rows and not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", "")
    written = sorted(path.name for path in run("mine", True).path.iterdir())  # negative control
    assert written == ["config.json", "events.jsonl", "loss.png", "metrics.jsonl", "tensorboard", "tokenizer.json"]
    assert "step 1 of delayed was skipped" in capsys.readouterr().out


# --- pipelines --------------------------------------------------------------------------------------------------------

STAGES = "--num-layers 2 --hidden-size 32 --num-heads 2 --batch-size 4 --microbatches 2 --seq-len 16".split()
STAGES += ["--mesh", "pipe=2"]


@pytest.mark.slow
def test_a_run_on_stages_is_a_run_on_one_device(book, tmp_path):
    def run(name, *flags):
        given = ["--data", str(book), "--recipe", "bf16", "--steps", "4", "--eval-every", "2", "--sample-tokens", "0"]
        assert train.main([*STAGES, *given, "--output", str(tmp_path), "--name", name, *flags]) == 0
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert (tmp_path / name / "loss.png").stat().st_size > 10_000
        return np.array([row["val_loss"] for row in rows])

    alone = run("alone", "--mesh", "data=1")
    np.testing.assert_allclose(run("stages"), alone, rtol=1e-4)
    assert np.abs(np.diff(alone)).min() > 1e-3  # negative control: one step more is not as close


def test_validation_and_sample_where_pipe_splits_params():
    sizes = {"num_layers": 2, "max_seq_len": 16, "hidden_size": 64}
    model = fp8.GPT(fp8.GPTConfig.preset("tiny", tie_embeddings=False, **sizes))
    loss_fn, tokens = fp8.next_token_loss(model), np.random.default_rng(0).integers(0, 256, (2, 4, 17), np.int32)

    def evaluate(axes, seed):
        made = devices.make_mesh(axes)
        step = fp8.make_train_step(loss_fn, fp8.fused_adamw(1e-3), model.recipe, 2, parallel=made)
        state = step.init_state(model.init, jax.random.key(seed), jax.ShapeDtypeStruct((4, 16), np.int32))
        kernel = state.params["layer_1"]["mlp"]["up"]["kernel"]
        assert kernel.addressable_shards[0].data.size == kernel.size // made.size
        # So large that logits count beside the noise that tokens are drawn with.
        variables = {**state.variables, "params": {**state.params, "head": 20 * state.params["head"]}}
        loss = train.make_validation(loss_fn)(variables, devices.on_mesh(made, tokens))
        return float(loss), generate.sample(model, variables, tokens[0, 0, :16], 12, seed=0)

    (loss, text), (loss_alone, text_alone), (loss_other, text_other) = (
        evaluate("pipe=2,tensor=2", 0), evaluate("data=1", 0), evaluate("pipe=2,tensor=2", 1)
    )  # fmt: skip
    assert loss == pytest.approx(loss_alone, rel=1e-5)
    assert (text == text_alone).all()
    assert loss_other != pytest.approx(loss_alone, rel=1e-3) and (text_other != text_alone).any()
