"""MaxText's own train loop, in bfloat16, in its own FP8, and in that of this library: tokens a second, and memory.

    python benchmarks/maxtext_step.py --output results/maxtext_step

Eight layers of the width of Llama 3 8B with its vocabulary, random tokens, MaxText's AdamW with float32 weights and
moments, cuDNN attention, on one GPU. Each variant runs in a process of its own, all with the same config but for
`quantization`. A step is timed by MaxText itself; the first ones, which compile, are left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SHAPES = {"1x8192": (1, 8192), "4x2048": (4, 2048)}
VARIANTS = {
    "bf16": "",
    "MaxText fp8": "fp8",
    "delayed": "jax_fp8",
    "current": "jax_fp8_current",
    "block": "jax_fp8_block",
    "delayed, head in FP8": "jax_fp8 head=jax_fp8_current",
}
SIZES = {
    "base_emb_dim": 4096,
    "base_num_query_heads": 32,
    "base_num_kv_heads": 8,
    "head_dim": 128,
    "base_mlp_dim": 14336,
    "base_num_decoder_layers": 8,
    "vocab_size": 128256,
}
OPTIONS = {
    "run_name": "timed",
    "dataset_type": "synthetic",
    "enable_checkpointing": "false",
    "decoder_block": "llama2",
    "attention": "cudnn_flash_jax",
    "hardware": "gpu",
    "skip_jax_distributed_system": "true",
    "enable_goodput_recording": "false",
    "monitor_goodput": "false",
    "log_config": "false",
}
FIRST = 4  # steps that are left out: they compile, and the loop runs ahead


def run_variant(quantization: str, arguments: list[str]) -> None:
    """MaxText in this process; prints the peak of the device's memory last."""
    import jax

    if quantization.startswith("jax_fp8"):
        from jax_fp8.integrations import maxtext

        maxtext.main([*arguments, *f"quantization={quantization}".split()])
    else:
        from maxtext.trainers.pre_train import train

        train.main(["", *arguments, f"quantization={quantization}"])
    device = jax.local_devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    print(json.dumps({"peak_bytes": peak, "device": device.device_kind}))


def timed(quantization: str, rows: int, seq: int, steps: int, others: list[str]) -> dict:
    """The median step and the losses of a variant, from the metrics that MaxText writes."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        own = (
            OPTIONS
            | SIZES
            | {
                "base_output_directory": folder,
                "metrics_file": metrics,
                "steps": steps,
                "per_device_batch_size": rows,
                "max_target_length": seq,
            }
        )
        arguments = [f"{name}={value}" for name, value in own.items()] + others
        program = [sys.executable, __file__, "--variant", quantization, "--", *arguments]
        done = subprocess.run(program, env=os.environ, capture_output=True, text=True)
        if done.returncode:
            return {"failed": (done.stdout + done.stderr)[-3000:]}
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        result = json.loads(done.stdout.strip().splitlines()[-1])
    seconds = [line["perf/step_time_seconds"] for line in lines[FIRST:]]
    step = statistics.median(seconds)
    return result | {
        "ms": 1e3 * step,
        "spread": (max(seconds) - min(seconds)) / step,
        "tokens_per_second": rows * seq / step,
        "losses": [line["learning/loss"] for line in lines],
        "listing": [line for line in done.stdout.splitlines() if line.startswith(("in FP8", "left as"))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("maxtext_step"), help="of the table, .md and .json")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--option", action="append", default=[], help="of MaxText, name=value; may be repeated")
    parser.add_argument("--variant", help=argparse.SUPPRESS)  # runs in this process
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant is not None:
        run_variant(args.variant, args.arguments)
        return
    results: dict = {}
    for shape in args.shapes:
        for name in args.variants:
            found = results.setdefault(shape, {})[name] = timed(VARIANTS[name], *SHAPES[shape], args.steps, args.option)
            print(
                shape,
                name,
                found.get("failed") or f"{found['ms']:.1f} ms, peak {found['peak_bytes'] / 2**30:.1f} GiB",
                flush=True,
            )
            args.output.with_suffix(".json").write_text(json.dumps(results, indent=1))
    args.output.with_suffix(".md").write_text(table(results))
    print(table(results))


def table(results: dict) -> str:
    lines = [
        "| tokens | variant | step, ms | tokens/s | peak, GiB | times MaxText's fp8 | last loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for shape, variants in results.items():
        base = variants.get("MaxText fp8", {}).get("ms")
        for name, found in variants.items():
            if "failed" in found:
                lines.append(f"| {shape} | {name} | failed | | | | |")
                continue
            ratio = f"{base / found['ms']:.2f}" if base else ""
            lines.append(
                f"| {shape} | {name} | {found['ms']:.1f} | {found['tokens_per_second']:,.0f} | "
                f"{found['peak_bytes'] / 2**30:.1f} | {ratio} | {found['losses'][-1]:.4f} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
