"""Several processes on the GPUs of one host, against one process that has all of them.

    python tests/gpu/processes_check.py --output processes_check.json    # two processes, and one for each GPU
    python tests/gpu/processes_check.py --self-test                      # two processes of one CPU device each

A small GPT takes three steps on each mesh. The loss is that of all rows, so it must be the same in all processes, and
the same as with one process. The script prints how many bytes of the FP8 state differ after the last step. Negative
control: in one more step a process has the rows of another one. Ends with exit code 1 if a check failed.

Each process runs this file: `processes_check.py PORT PROCESSES PROCESS RESULT`.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.report import Report, Script, on_gpu, run_script
from hybrid import with_scales
from several_processes import cpus, free_port, gpus, run_processes

import jax_fp8 as fp8

STEPS, ROWS, MICROBATCHES = 3, 32, 8
ONE_ORDER_OF_SUMS = 1e-6  # relative, of losses on two devices: a sum of two has one order
OTHER_ORDERS = 1e-4  # and on more, where a value in FP8 may be the next one: seen 6e-6; controls are ten times as far
NOT_TIMED = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}  # each program would have the products that won that time
LIMIT = 400  # seconds for the processes of one run


def meshes(devices: int) -> list[dict[str, int]]:
    """Each axis alone, and three of them where there are eight devices."""
    alone = [{axis: devices} for axis in ("data", "fsdp", "tensor", "pipe")]
    together = [{"data": 2, "fsdp": 2, "tensor": 2}, {"pipe": 2, "data": 2, "tensor": 2}]
    return alone + (together if devices == 8 else [])


def sizes() -> dict:
    layers = {"num_layers": max(2, jax.device_count()), "num_heads": 8}
    if on_gpu():
        return layers | {"vocab_size": 8192, "hidden_size": 1024, "max_seq_len": 256}
    return layers | {"vocab_size": 128, "hidden_size": 128, "max_seq_len": 32}


def batch(number: int) -> np.ndarray:
    """Each row has its own tokens, so that a swap of rows changes the loss."""
    of_a_row = sizes()["vocab_size"] // ROWS
    tokens = np.random.default_rng(number).integers(0, of_a_row, (ROWS, sizes()["max_seq_len"] + 1))
    return (tokens + of_a_row * np.arange(ROWS)[:, None]).astype(np.int32)


def own_rows(mesh: Mesh) -> np.ndarray:
    """The rows of a batch that the devices of this process have."""
    axes = tuple(axis for axis in ("data", "fsdp") if axis in mesh.axis_names)
    by_device = NamedSharding(mesh, P(axes)).addressable_devices_indices_map((ROWS,))
    return np.unique([np.arange(ROWS)[rows] for rows in by_device.values()])


def train(axes: dict[str, int]) -> dict:
    """The losses, the FP8 state after them as bytes, and the loss of one more step in which those who have the first
    rows take others; of which there are none where they have them all.
    """
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
    model = fp8.GPT(fp8.GPTConfig(**sizes()), attention_implementation="xla")  # cuDNN's backward repeats no bits
    step = fp8.make_train_step(
        fp8.next_token_loss(model),
        fp8.fused_adamw(1e-3),
        model.recipe,
        MICROBATCHES if "pipe" in axes else 1,
        parallel=mesh,
        warm_start=False,
    )
    init, rows = lambda *given: with_scales(model.init(*given)), own_rows(mesh)
    state = step.init_state(
        init, jax.random.key(0), jnp.zeros((ROWS // MICROBATCHES, batch(0).shape[1] - 1), jnp.int32)
    )
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, batch(number)[rows])
        losses.append(float(metrics["loss"]))
    whole = multihost_utils.process_allgather(state.fp8, tiled=True)
    found = {"losses": losses, "fp8": b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(whole)).hex()}
    others = (rows + len(rows)) % ROWS if rows[0] == 0 else rows
    loss = float(step(state, batch(STEPS)[others])[1]["loss"])
    return found | {"control": loss, "has all rows": len(rows) == ROWS}


def work(port: str, processes: str, process: str, result: str) -> None:
    """The work of each process."""
    if int(processes) > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(process))
    found = {str(axes): train(axes) for axes in meshes(jax.device_count())}
    Path(result).write_text(json.dumps(found))


def run(devices: int, processes: int) -> list[dict]:
    """The results of each of `processes` processes."""
    environments, port = (gpus if on_gpu() else cpus)(devices // processes, processes), free_port()
    if on_gpu():
        environments = [environment | NOT_TIMED for environment in environments]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{process}.json") for process in range(processes)]
        commands = [[__file__, port, processes, process, file] for process, file in enumerate(files)]
        for finished in run_processes(*commands, environments=environments, limit=LIMIT):
            if finished.returncode:
                raise RuntimeError(f"a process of {processes} must end well, got: {finished.stderr[-3000:]}")
        return [json.loads(file.read_text()) for file in files]


def check_processes(report: Report):
    devices = jax.device_count() if on_gpu() else 2
    if devices not in (2, 4, 8):
        raise ValueError(f"processes must share 2, 4 or 8 GPUs, got {devices}; choose them by CUDA_VISIBLE_DEVICES")
    limit = ONE_ORDER_OF_SUMS if devices == 2 else OTHER_ORDERS
    (wanted,) = run(devices, 1)
    for processes in sorted({2, devices}):
        first, *others = run(devices, processes)
        for mesh, expected in wanted.items():
            where, got = f"{mesh}, {processes} processes", first[mesh]
            same = all(other[mesh] == got for other in others)
            report.expect("all processes have the same losses", same, where)
            error = float(np.max(np.abs(np.divide(got["losses"], expected["losses"]) - 1)))
            report.worst[f"loss, {where}"] = error
            report.expect("losses of one process", error <= limit, f"{where}: off by {error:.1e}")
            ours, theirs = (np.frombuffer(bytes.fromhex(of["fp8"]), np.uint8) for of in (got, expected))
            report.worst[f"bytes of the FP8 state, {where}"] = float(np.sum(ours != theirs))
            if not got["has all rows"]:
                off = abs(got["control"] / expected["control"] - 1)
                report.worst[f"control: other rows, {where}"] = off
                report.expect("controls", off > 10 * limit, f"{where}: other rows by {off:.1e}")


CHECKS = [check_processes]


def main(arguments: list[str] | None = None) -> int:
    return run_script(Script(__file__, __doc__, CHECKS, self_test=True), arguments)


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1].isdigit():
        work(*sys.argv[1:])
    else:
        sys.exit(main())
