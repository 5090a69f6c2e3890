"""Several processes: a step on a mesh of all their devices is that of one process which has the same devices.

This file is also the script that each of them runs: `python tests/meshes/test_processes.py PORT PROCESS FILE`. Sums
between processes go through gloo, and may be added up in another order than within one.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1]))

from hybrid import with_scales
from several_processes import cpus, free_port, run_processes

import jax_fp8 as fp8
from jax_fp8.run import train

ROOT = Path(__file__).parents[2]
PROCESSES, BATCH, SEQ = 2, 16, 16
AXES = {"data": 2, "fsdp": 2, "tensor": 2}
DEVICES = 8
SUMS_IN_ANOTHER_ORDER = 1e-6  # seen: 0 here, and 9e-8 (the last bit of float32) with two microbatches


def global_batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 64, (BATCH, SEQ + 1)).astype(np.int32)


class Training:
    """A small GPT with delayed scaling, on all devices there are. Without a warm start, which is a program of its own,
    it begins with scales that gradients can use."""

    def __init__(self, warm_start: bool = False):
        mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES))
        self.model = fp8.GPT(
            fp8.GPTConfig(vocab_size=64, num_layers=1, num_heads=4, hidden_size=64, max_seq_len=SEQ, use_bias=False)
        )
        self.tx = fp8.fused_adamw(1e-2)
        self.loss_fn = fp8.next_token_loss(self.model)
        self.step = fp8.make_train_step(self.loss_fn, self.tx, self.model.recipe, parallel=mesh, warm_start=warm_start)
        self.init = self.model.init if warm_start else lambda *given: with_scales(self.model.init(*given))

    def fresh(self) -> fp8.TrainState:
        return self.step.init_state(self.init, *self._init_arguments())

    def driven(self, state: fp8.TrainState, *parts: slice) -> list[float]:
        """`losses`, in pieces."""
        found, pending = [], self.step.start(state)
        for number, rows in enumerate(parts):
            pending = self.step.accumulate_step(state, pending, global_batch(number)[rows], True)
            state, pending, metrics = self.step.apply_step(state, pending)
            found.append(float(metrics["loss"]))
        return found

    def by_oneself(self, variables: dict, *parts: slice) -> list[float]:
        """`losses` of a loop of one's own without an optimizer, on batches that are put together of parts."""
        parallel, found = self.step._programs.parallel, []
        gradient = jax.jit(fp8.value_and_grad(self.loss_fn, parallel=parallel.mesh))
        for number, rows in enumerate(parts):
            where = NamedSharding(parallel.mesh, P(("data", "fsdp")))
            batch = jax.make_array_from_process_local_data(where, global_batch(number)[rows])
            found.append(float(gradient(variables, batch)[0]))
        return found

    def placed(self) -> fp8.TrainState:
        """The same, from a state that every process has made for itself."""
        variables = jax.jit(self.init)(*self._init_arguments())
        return self.step.place(fp8.TrainState.create(variables=variables, tx=self.tx), global_batch(0))

    def losses(self, state: fp8.TrainState, *parts: slice) -> list[float]:
        """One for each step, to which this process gives this part of the batch."""
        found = []
        for number, rows in enumerate(parts):
            state, metrics = self.step(state, global_batch(number)[rows])
            found.append(float(metrics["loss"]))
        assert int(state.step) == len(parts)
        return found

    def _init_arguments(self):
        return jax.random.key(0), jnp.zeros((BATCH, SEQ), jnp.int32)


def part(process: int) -> slice:
    return slice(process * BATCH // PROCESSES, (process + 1) * BATCH // PROCESSES)


def main(port: str, process: str, file: str, others: str = "") -> None:
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, int(process))
    training, own = Training(warm_start=bool(others)), part(int(process))
    if others:
        variables, state = training.fresh().variables, training.fresh()
        Path(file).write_text(json.dumps([training.driven(state, own, own), training.by_oneself(variables, own, own)]))
        return
    losses = training.losses(training.fresh(), own, own, own)
    with_the_rows_of_another = training.losses(training.placed(), own, own, part(0))
    Path(file).write_text(json.dumps([losses, with_the_rows_of_another]))


def test_two_processes_train_like_one(tmp_path):
    files, port = [tmp_path / f"{process}.json" for process in range(PROCESSES)], free_port()
    commands = [[__file__, port, process, file] for process, file in enumerate(files)]
    for finished in run_processes(*commands, environments=cpus(DEVICES // PROCESSES, PROCESSES)):
        assert finished.returncode == 0, finished.stderr
    first, second = (json.loads(file.read_text()) for file in files)
    assert first == second  # a loss is that of all, in every process

    training, everything = Training(), slice(None)
    expected = training.losses(training.fresh(), everything, everything, everything)
    losses, with_the_rows_of_another = first
    np.testing.assert_allclose(losses, expected, rtol=SUMS_IN_ANOTHER_ORDER)
    np.testing.assert_allclose(with_the_rows_of_another[:2], expected[:2], rtol=SUMS_IN_ANOTHER_ORDER)
    # Negative control: in the third step one half of the batch is there twice, and the other is missing.
    assert abs(with_the_rows_of_another[2] - expected[2]) > 1e3 * SUMS_IN_ANOTHER_ORDER * expected[2]


@pytest.mark.slow
def test_two_processes_drive_microbatches_and_loops_like_one(tmp_path):
    files, port = [tmp_path / f"{process}.json" for process in range(PROCESSES)], free_port()
    commands = [[__file__, port, process, file, "others"] for process, file in enumerate(files)]
    for finished in run_processes(*commands, environments=cpus(DEVICES // PROCESSES, PROCESSES)):
        assert finished.returncode == 0, finished.stderr
    first, second = (json.loads(file.read_text()) for file in files)
    assert first == second
    training, everything = Training(warm_start=True), (slice(None),) * 2
    expected = (
        training.driven(training.fresh(), *everything),
        training.by_oneself(training.fresh().variables, *everything),
    )
    np.testing.assert_allclose(first, expected, rtol=SUMS_IN_ANOTHER_ORDER)
    assert abs(expected[0][1] - expected[1][1]) > 1e3 * SUMS_IN_ANOTHER_ORDER  # negative control: of other params


TRAIN = ["-m", "jax_fp8", "train"]
SMALL = "--num-layers 1 --hidden-size 32 --num-heads 2 --batch-size 4 --seq-len 16 --sample-tokens 8 --steps 3".split()


@pytest.mark.slow
def test_a_run_in_two_processes(book, tmp_path, capsys):
    """Both train, the first one writes and prints; the log is that of one process with two devices."""
    arguments = [
        *SMALL,
        "--recipe",
        "bf16",
        "--data",
        book,
        "--eval-every",
        2,
        "--diagnose-every",
        3,
        "--mesh",
        "data=2",
        "--output",
        tmp_path,
    ]
    together = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", PROCESSES, "--process-id"]
    commands = [[*TRAIN, *arguments, "--name", "two", *together, process] for process in range(PROCESSES)]
    first, second = run_processes(*commands, environments=cpus(1, PROCESSES))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "validation loss" in first.stdout and "loss " in first.stderr
    own = [line for line in second.stdout.splitlines() if "[Gloo]" not in line]
    assert (own, second.stderr) == ([], "")

    assert train.main([*map(str, arguments), "--name", "one"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["one", "two"]
    two, one = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("two", "one")
    )
    assert [row["step"] for row in two] == [row["step"] for row in one] == [0, 2, 3]
    for key in ("loss", "val_loss"):
        found, expected = ([row[key] for row in rows if row[key] is not None] for rows in (two, one))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    diagnosed = [json.loads((tmp_path / name / "diagnostics.jsonl").read_text()) for name in ("two", "one")]
    norms = [[row["norm"] for row in found["gradients"]] for found in diagnosed]
    np.testing.assert_allclose(*norms, rtol=1e-3)
    last = [printed.splitlines()[-3] for printed in (first.stdout, capsys.readouterr().out)]
    assert last[0] == last[1]  # of the sample


@pytest.mark.slow
def test_a_run_in_two_processes_ends_after_one_step_and_goes_on(book, tmp_path):
    """Of which one alone is told to end; both save, in one checkpoint, and end as if they had not been interrupted."""
    options = [*SMALL, "--steps", 300, "--recipe", "bf16", "--data", book, "--mesh", "fsdp=2", "--output", tmp_path]
    options += ["--checkpoint-every", 150, "--eval-every", 100]

    def commands(name):
        together = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", PROCESSES, "--process-id"]
        own = [*options, "--name", name, "--resume", "auto", *together]
        return [[*TRAIN, *own, process] for process in range(PROCESSES)]

    def both(name):
        for finished in run_processes(*commands(name), environments=cpus(1, PROCESSES)):
            assert finished.returncode == 0, finished.stderr

    def notes(name):
        folders = (tmp_path / name / "checkpoints").iterdir()
        return json.loads((max(folders, key=lambda path: int(path.name)) / "notes/metadata").read_text())

    def losses(name):
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [(row["step"], row["loss"], row["val_loss"]) for row in rows]

    both("whole")
    log = tmp_path / "mine/metrics.jsonl"
    for finished in run_processes(*commands("mine"), environments=cpus(1, PROCESSES), stop=lambda: log.exists()):
        assert finished.returncode in (130, 143), finished.stderr
    assert 0 < notes("mine")["step"] < 300
    both("mine")
    assert notes("mine")["arrays"] == notes("whole")["arrays"] and notes("mine")["step"] == 300
    assert losses("mine") == losses("whole")


if __name__ == "__main__":
    main(*sys.argv[1:])
