"""Text for `meshes.py --text`, and a plot of the losses that it writes.

These commands are a file of their own because they need packages that a machine with GPUs may lack.

    python benchmarks/mesh_curves.py text batches.npy --steps 200 --batch-size 16 --seq-len 1024
    python benchmarks/meshes.py --mesh data=2 fsdp=2 --preset gpt2-124m --text batches.npy --losses losses.json
    python benchmarks/mesh_curves.py draw losses.json --output curves.png

The text is tokenized as in `convergence.py`. The batches are fixed here, so every mesh reads the same ones.
"""

import argparse
import json
import pathlib
import sys

import numpy as np
from matplotlib.figure import Figure
from mesh_cases import Case
from text_data import Reading, prepare


def write_batches(reading: Reading, data: pathlib.Path | None, cache: pathlib.Path, output: pathlib.Path) -> str:
    """Write all batches as one array (steps, batch, seq + 1), uint16 if the vocabulary fits; returns a description of
    the text.
    """
    prepared = prepare(reading, data, cache)
    dtype = np.uint16 if reading.vocab_size <= 2**16 else np.int32
    windows = np.asarray(prepared.starts)[:, :, None] + np.arange(reading.seq_len + 1)
    np.save(output, np.asarray(prepared.tokens)[windows].astype(dtype))
    return prepared.description


def read_losses(files: list[pathlib.Path]) -> dict[str, list[float]]:
    """The losses of every case in results of `meshes.py --losses`, by mesh and recipe."""
    found = {}
    for file in files:
        for result in json.loads(file.read_text()):
            case = Case(**result["case"])
            if "losses" in result:
                found[f"{case.mesh}, {case.name}"] = result["losses"]
    if not found:
        raise ValueError(f"a picture needs losses, got none in {', '.join(map(str, files))}; make them with --losses")
    return found


def draw(curves: dict[str, list[float]], output: pathlib.Path) -> None:
    """Plot all curves; beside them, the difference of each curve from the first one, as a mean over ten steps."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    whole, apart = figure.subplots(1, 2)
    first = next(iter(curves.values()))
    for index, (name, losses) in enumerate(curves.items()):
        style = {"linewidth": max(1.0, 5 - index), "alpha": 0.7}  # thinner and thinner: they lie on one another
        whole.plot(range(1, len(losses) + 1), losses, label=f"{name}: {losses[-1]:.4f}", **style)
        steps, difference = smoothed(np.asarray(losses) / first[: len(losses)] - 1)
        apart.plot(steps, 100 * difference, label=name, **style | {"linewidth": 1.5})
    whole.set(xlabel="step", ylabel="cross entropy, nats per token")
    apart.set(xlabel="step", ylabel=f"% above {next(iter(curves))}")
    whole.legend(fontsize="small")
    for axes in (whole, apart):
        axes.grid(alpha=0.3)
    figure.savefig(output, dpi=130)


def smoothed(values: np.ndarray, count: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Means over a number of steps, and the last step of each mean."""
    parts = max(1, len(values) // count)
    width = min(count, len(values))
    return width * np.arange(1, parts + 1), values[: parts * width].reshape(parts, width).mean(axis=1)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    text = commands.add_parser("text", help="tokenize text, and write the batches of a run")
    text.add_argument("output", type=pathlib.Path)
    text.add_argument("--data", type=pathlib.Path, help="file or folder instead of the interpreter's Python sources")
    text.add_argument("--cache", type=pathlib.Path, default=pathlib.Path.home() / ".cache" / "jax_fp8")
    for name, default in (("steps", 200), ("batch-size", 16), ("seq-len", 1024), ("vocab-size", 32_768)):
        text.add_argument(f"--{name}", type=int, default=default)
    curves = commands.add_parser("draw", help="draw the losses in results of meshes.py")
    curves.add_argument("files", type=pathlib.Path, nargs="+")
    curves.add_argument("--output", type=pathlib.Path, required=True)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        if options.command == "draw":
            draw(read_losses(options.files), options.output)
            print(f"written to {options.output}")
            return 0
        names = ("steps", "batch_size", "seq_len", "vocab_size")
        sizes = {name: getattr(options, name) for name in names}
        # Nothing is held out for long: prepare wants one batch of it.
        reading = Reading(**sizes, validation_tokens=options.batch_size * options.seq_len)
        print(write_batches(reading, options.data, options.cache, options.output))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
