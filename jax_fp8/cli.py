"""`python -m jax_fp8`: `doctor` checks this machine; `tune` measures the GEMMs of a model, or the rates of this GPU;
`plan` estimates a step on GPUs that are not here; `train` trains a GPT, `generate` and `export` read its checkpoints,
and `report` makes a page of the run; `convert` converts models from and to Hugging Face.
"""

import argparse
import datetime
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp

from jax_fp8 import __version__
from jax_fp8.doctor import doctor
from jax_fp8.models.config import PRESETS, GPTConfig
from jax_fp8.models.convert import DTYPES, WAYS, convert
from jax_fp8.models.gpt import GPT
from jax_fp8.models.loss import next_token_loss
from jax_fp8.optim.fused_adam import fused_adamw
from jax_fp8.parallel.schedules import SCHEDULES
from jax_fp8.plan.choices import RECIPES, head_in, layers_in
from jax_fp8.plan.described import GPUS
from jax_fp8.plan.gpt_plans import plan_preset
from jax_fp8.plan.rates import RateTable
from jax_fp8.plan.rates_bench import measure_rates
from jax_fp8.report.page import write_report
from jax_fp8.run.tokenizer_files import check_no_other, copied_files, has_tokenizer, write_tokenizer
from jax_fp8.state.train_state import TrainState
from jax_fp8.streams import one_line, surviving
from jax_fp8.train.train_step import make_train_step
from jax_fp8.tune.gemm_table import HEADINGS, default_path, this_gpu
from jax_fp8.tune.tune import tune

CONVERT_USAGE = "\n       ".join(f"python -m jax_fp8 convert {way}" for way in WAYS)
RUN_COMMANDS = {
    "train": "train a GPT in FP8 on real text",
    "generate": "generate text from a checkpoint, or a model of Hugging Face",
    "export": "write the params of a checkpoint to a file",
}


def tune_preset(
    preset: str,
    batch: int = 8,
    sequence: int | None = None,
    microbatches: int = 1,
    recipe: str = "delayed",
    fast: bool = False,
    fp8_head: bool = False,
    bf16_params: bool = False,
    again: bool = False,
) -> int:
    """Tune the GEMMs of a GPT's training step on one device, and print what was found. Returns the exit code."""
    device, cublaslt = this_gpu()
    config = GPTConfig.preset(preset)
    length = sequence or config.max_seq_len
    if batch < 1 or microbatches < 1 or batch % microbatches or not 1 <= length <= config.max_seq_len:
        raise ValueError(
            f"a batch of sequences of at most {config.max_seq_len} tokens must split into microbatches, "
            f"got {batch=}, sequence={length}, {microbatches=}; change one of them"
        )
    layer_recipe = layers_in(recipe, fast)
    head_recipe = head_in(recipe) if fp8_head else None
    param_dtype = jnp.bfloat16 if bf16_params else jnp.float32
    model = GPT(config, recipe=layer_recipe, param_dtype=param_dtype, head_recipe=head_recipe)
    tx = fused_adamw(1e-4)
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)

    def create(tokens: jax.Array) -> TrainState:
        return TrainState.create(variables=model.init(jax.random.key(0), tokens[:, :-1]), tx=tx)

    step = make_train_step(next_token_loss(model), tx, layer_recipe, microbatches)
    path = default_path(device, cublaslt)
    print(
        f"{preset}, {batch} x {length} tokens, {microbatches} microbatches, {device}, cuBLASLt {cublaslt}\n\n{HEADINGS}"
    )
    table = tune(step, jax.eval_shape(create, tokens), tokens, again=again, report=lambda line: print(line, flush=True))
    print(f"\n{len(table.choices)} GEMMs are in {path}; use them by `with fp8.tuned_gemms(fp8.GemmTable.load()):`")
    return 0


def tune_rates(path: str) -> int:
    """Measure the rates that `plan --rates` reads, on one device, and print them. Returns the exit code."""
    device, cublaslt = this_gpu()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax_fp8", "jax"))
    source = f"python -m jax_fp8 tune --rates, {datetime.date.today()}, cuBLASLt {cublaslt}, {versions}"
    base = RateTable.load(path) if Path(path).exists() else RateTable.for_gpu(next(iter(GPUS)))
    table = base.renewed(device, source, **measure_rates(report=lambda line: print(line, flush=True)))
    table.save(path)
    unchanged = [name for name, origin in table.sources.items() if origin != source]
    print(
        f"\n{path} has these rates for `python -m jax_fp8 plan --rates {path}`. Not measured, and unchanged: "
        f"{', '.join(unchanged)}"
    )
    return 0


def report_run(run: str, output: str | None = None) -> int:
    """Write the page of a run, given its folder or its name in runs/, and print where it is. Returns the exit code."""
    named = os.path.join("runs", run)
    path = write_report(named if os.path.isdir(named) and not os.path.isdir(run) else run, output)
    print(f"{path}: {path.stat().st_size / 1000:,.0f} kB, for any browser")
    return 0


def convert_model(source: list[str], target: list[str], **options: float | str | None) -> int:
    """Convert a model, and copy the files of its tokenizer where there are any. Returns the exit code."""
    # A folder of Hugging Face has them, and so has the folder of a file of params.
    here, there = (Path(side[1]) if len(side) == 2 else Path(side[0]).parent for side in (source, target))
    files = copied_files(here) if has_tokenizer(here) and here.absolute() != there.absolute() else {}
    if files:
        check_no_other(there, files)
    status = convert(source, target, **options)  # type: ignore[arg-type]
    if files:
        write_tokenizer(there, files, is_for_transformers=len(target) == 2)
        print(f"copied the tokenizer of {here} to {there}")
    return status


def run_command(command: str, argv: list[str]) -> int:
    """Run one of RUN_COMMANDS, which parse their options themselves. Returns the exit code."""
    try:
        from jax_fp8.run import export, generate, train
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("jax_fp8"):
            raise
        remedy = '`pip install "jax_fp8[train]"`, or in a checkout `pip install ".[train]"`'
        print(f"python -m jax_fp8 {command}: needs the extra `train`, got no {error.name}; {remedy}", file=sys.stderr)
        return 2
    return {"train": train, "generate": generate, "export": export}[command].main(argv)


class _Parser(argparse.ArgumentParser):
    """Reports an error in one sentence, without a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands but those of RUN_COMMANDS, which are only listed."""
    parser = _Parser(prog="python -m jax_fp8", description="FP8 training of Transformers in JAX.")
    parser.add_argument("--version", action="version", version=f"jax_fp8 {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("doctor", help="check this machine, and say what is missing and what to do about it")
    for command, words in RUN_COMMANDS.items():
        commands.add_parser(command, help=words)
    tuner = commands.add_parser("tune", help="measure cuBLASLt's algorithms for the FP8 GEMMs of a GPT on this GPU")
    tuned = tuner.add_mutually_exclusive_group(required=True)
    model = f"the model: {', '.join(PRESETS)}"
    tuned.add_argument("--preset", metavar="NAME", choices=PRESETS, help=model)
    tuned.add_argument("--rates", metavar="FILE", help="measure the rates of `plan --rates FILE` instead")
    tuner.add_argument("--batch", type=int, default=8, help="sequences that one GPU gets a step")
    tuner.add_argument("--sequence", type=int, help="tokens a sequence; by default the model's longest")
    tuner.add_argument("--microbatches", type=int, default=1, help="parts that a batch is split into")
    tuner.add_argument("--recipe", choices=RECIPES, default="delayed", help="of the FP8 layers")
    tuner.add_argument(
        "--fast",
        action="store_true",
        help="fast accumulation in all of the layers' GEMMs: a recipe with split_accumulator=()",
    )
    tuner.add_argument("--fp8-head", action="store_true", help="the head in FP8 too: GPT(head_recipe=...)")
    tuner.add_argument("--bf16-params", action="store_true", help="params in bfloat16: GPT(param_dtype=jnp.bfloat16)")
    tuner.add_argument("--again", action="store_true", help="measure known GEMMs again")
    planner = commands.add_parser("plan", help="what a GPT's training step needs on GPUs that are not here")
    planner.add_argument("--preset", metavar="NAME", choices=PRESETS, required=True, help=model)
    planner.add_argument("--mesh", default="data=1", help="axes among pipe, data, fsdp and tensor: fsdp=4,tensor=2")
    planner.add_argument("--gpu", choices=GPUS, default="h200", help="the kind of GPU")
    planner.add_argument("--batch", type=int, help="sequences of a step; by default 8 a microbatch of each part")
    planner.add_argument("--sequence", type=int, help="tokens a sequence; by default the model's longest")
    planner.add_argument("--microbatches", type=int, help="parts of a batch; else 1, or 4 for each stage of pipe")
    planner.add_argument("--schedule", choices=SCHEDULES, help="of the pipeline, where the mesh has pipe; else 1f1b")
    planner.add_argument("--chunks", type=int, help="of layers on each stage of --schedule interleaved; 2 if left out")
    planner.add_argument(
        "--recipe", choices=[*RECIPES, "bf16"], default="delayed", help="of the FP8 layers; bf16: no FP8"
    )
    for name, words in (
        ("--fast", "fast accumulation in all of the layers' GEMMs"),
        ("--fp8-head", "the head in FP8 too"),
        ("--fp8-attention", "attention in FP8 too, with --recipe delayed"),
        ("--bf16-params", "params in bfloat16, beside the 16 bits that they lack"),
        ("--bf16-moments", "Adam's moments in bfloat16"),
        ("--sequence-parallel", "rows between layers split over tensor, too"),
        ("--recompute", "keep less for the backward: --remat norms"),
    ):
        planner.add_argument(name, action="store_true", help=words)
    planner.add_argument(
        "--remat", default="none", help="what layers keep: none, norms, full, or offload:N on the host"
    )
    planner.add_argument("--lora", type=int, default=0, metavar="RANK", help="adapters alone, on a base frozen in FP8")
    planner.add_argument("--rates", metavar="FILE", help="estimate times by the rates of `tune --rates FILE`")
    planner.add_argument("--between-hosts", type=float, metavar="GB/S", help="of each GPU, where hosts have 8")
    planner.add_argument("--suggest", action="store_true", help="try the meshes of --devices, and rank them")
    planner.add_argument("--devices", type=int, help="GPUs of --suggest")
    planner.add_argument("--tries", type=int, default=4, help="meshes that --suggest compiles for")
    reporter = commands.add_parser("report", help="make one HTML page of the folder of a training run")
    reporter.add_argument("run", help="its folder, or its name in runs/, such as tiny-delayed")
    reporter.add_argument("--output", metavar="FILE", help="where the page goes; by default report.html in the folder")
    converter = commands.add_parser(
        "convert", help="a model of Hugging Face into a file of params, or back", usage=CONVERT_USAGE
    )
    for name, words in (("source", "--from"), ("target", "--to")):
        what = f"huggingface and a folder, or a file {'of params' if name == 'source' else 'to write'}"
        converter.add_argument(words, dest=name, nargs="+", required=True, metavar="WHAT", help=what)
    converter.add_argument("--dtype", choices=DTYPES, help="of the result; by default that of each array")
    converter.add_argument("--vocab-size", type=int, help="tokens to write to huggingface, without padding rows")
    converter.add_argument(
        "--part-gb", type=float, default=5.0, help="largest size of a file that is written to huggingface"
    )
    return parser


def main(argv: list[str]) -> int:
    """Run a command line. Returns the exit status."""
    with surviving() as streams:
        return streams.status(_main(argv))


def _main(argv: list[str]) -> int:
    if argv and argv[0] in RUN_COMMANDS:
        return run_command(argv[0], argv[1:])
    parser = make_parser()
    options = vars(parser.parse_args(argv))
    command = options.pop("command")
    if command is None:
        parser.print_help()
        return 0
    if command == "doctor":
        return doctor()
    run = {"tune": tune_preset, "plan": plan_preset, "report": report_run, "convert": convert_model}[command]
    if command == "tune" and (rates := options.pop("rates")) is not None:
        run, options = tune_rates, {"path": rates}
    try:
        return run(**options)
    except (ValueError, OSError) as error:
        print(f"{parser.prog} {command}: {one_line(error)}", file=sys.stderr)
        return 1
