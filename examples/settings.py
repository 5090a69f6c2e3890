"""What a run can be told: the command line, the defaults of each model size, and what cannot be trained.

Every complaint is a ValueError of one sentence: what must hold, what arrived, what to do.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Literal

import command_line
import scalars

import jax_fp8 as fp8


@dataclasses.dataclass(frozen=True)
class Settings:
    """Train a GPT in FP8 on real text."""

    preset: str = "tiny"
    """Model size; it also chooses the defaults below."""
    recipe: Literal["delayed", "current", "block", "bf16"] = "delayed"
    """How the scales of FP8 tensors are found; bf16 is no FP8 at all."""
    fast: bool = False
    """Let all GEMMs of the layers accumulate fast; by default those of gradients do not, and of block none."""
    fp8_head: bool = False
    """Multiply the output head in FP8 too."""
    fp8_attention: bool = False
    """Attend in FP8 too, for long sequences; needs heads of 128 features, and delayed."""
    compare: bool = False
    """Train in bfloat16 too, from the same parameters and on the same batches, and plot both."""
    data: Path | None = None
    """A text file or a folder of them; by default the Python standard library's own sources."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """Bytes, or byte pairs learnt from the training text (and cached)."""
    vocab_size: int = 16384
    """Tokens that bpe may learn."""
    steps: int = 450
    """Optimizer steps."""
    batch_size: int = 8
    """Sequences a step."""
    seq_len: int = 128
    """Tokens a sequence."""
    microbatches: int = 1
    """Parts a batch is split into, to save memory; gradients are accumulated over them."""
    learning_rate: float = 1e-3
    """Peak of the schedule: linear warmup, then linear decay to zero."""
    dropout: float = 0.0
    """How much training drops of embeddings and of what attention and MLP add to them, as GPT-2's 0.1."""
    seed: int = 0
    """Of parameters, data order, dropout and sample."""
    remat: str = "none"
    """What layers keep for the backward: none (all it wants), norms (less), full (what enters them), or offload:N (all,
    but of N layers in the host's memory)."""
    mesh: str = "data=1"
    """Devices by axis, as in data=2,tensor=4: data splits the batch, fsdp params too, tensor the layers; each device of
    pipe has some of the layers, and microbatches pass from one to the next."""
    sequence_parallel: bool = False
    """Over tensor, let each device keep its part of the tokens between layers."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """In which gradients are summed over data and fsdp, and sent over pipe; bfloat16 sends half the bytes."""
    schedule: str = ""
    """With pipe, in which order its devices work: 1f1b (the default), gpipe, interleaved or zero-bubble."""
    chunks: int = 0
    """With interleaved, how many groups of layers each device of pipe has; 0 is 2."""
    distributed: bool = False
    """Run as one of several processes, of which Slurm, Open MPI or Kubernetes tell jax."""
    coordinator: str = ""
    """Run as one of several processes that nothing tells jax of: HOST:PORT of the first one."""
    num_processes: int | None = None
    """With --coordinator: how many there are."""
    process_id: int | None = None
    """With --coordinator: which one this is, from 0; 0 writes and prints."""
    hidden_size: int = 0
    """Width of the model."""
    num_layers: int = 0
    """Depth of the model."""
    num_heads: int = 0
    """Attention heads a layer."""
    eval_every: int = 50
    """Steps between two validations."""
    checkpoint_every: int = 0
    """Steps between two checkpoints, from which --resume goes on; 0 saves none."""
    keep: int = 2
    """Checkpoints that stay; older ones are removed."""
    resume: str = ""
    """Go on with this run of --output, whatever --name is, from its last checkpoint; auto: with the last run of this
    name, or begin it."""
    skip_spikes: bool = False
    """Skip steps whose loss is far above those before, as steps with a loss that is no number always are."""
    stop_after_skips: int = 3
    """End the run when so many steps in a row were skipped."""
    diagnose_every: int = 0
    """Steps between two of which all tensors and gradients are looked at; 0: none but those that were skipped."""
    tensorboard: bool = False
    """Write the logs for TensorBoard, too."""
    profile: str = ""
    """FIRST:LAST: write a profile of these steps by jax.profiler; the first step of all is compilation."""
    sample_tokens: int = 256
    """Length of the text generated at the end; 0 is none."""
    name: str = ""
    """Of the run's folder; by default the preset and the recipe."""
    output: Path = Path("runs")
    """Where run folders are made."""
    cache: Path = Path.home() / ".cache" / "jax_fp8"
    """Where trained tokenizers are kept."""


REMATS = ("none", "norms", "full")  # and offload:N
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")


def defaults(preset: str) -> Settings:
    """Settings that suit a preset; ValueError names the presets if there is none of this name."""
    model = fp8.GPTConfig.preset(preset)
    shape = Settings(
        preset=preset, hidden_size=model.hidden_size, num_layers=model.num_layers, num_heads=model.num_heads
    )
    if preset == "tiny":
        return shape
    pairs = dataclasses.replace(shape, tokenizer="bpe", steps=1000, eval_every=100)
    if model.hidden_size <= 1024:
        return dataclasses.replace(pairs, batch_size=32, seq_len=1024, learning_rate=6e-4)
    return dataclasses.replace(pairs, batch_size=8, seq_len=2048, learning_rate=2e-4)


def parse(argv: list[str]) -> Settings:
    """Command line → settings."""

    @dataclasses.dataclass(frozen=True)
    class Preset:
        preset: str = "tiny"

    chosen = command_line.read_part(Preset, argv)
    described = "Train a GPT in FP8 on real text."
    return command_line.read(Settings, argv, described, default=defaults(chosen.preset))


def check(settings: Settings) -> None:
    """Raise a ValueError of one sentence for settings that cannot be trained."""
    for field in ("steps", "batch_size", "seq_len", "microbatches", "eval_every", "num_layers", "num_heads"):
        if (value := getattr(settings, field)) < 1:
            raise ValueError(f"--{field.replace('_', '-')} must be at least 1, got {value}")
    if not 0 <= settings.seed < 2**63:
        raise ValueError(f"--seed must be from 0 to 2**63 - 1, got {settings.seed}")
    if settings.sample_tokens < 0:
        raise ValueError(f"--sample-tokens must not be negative, got {settings.sample_tokens}; 0 writes no sample")
    if settings.checkpoint_every < 0:
        raise ValueError(f"--checkpoint-every must not be negative, got {settings.checkpoint_every}; 0 saves none")
    if settings.keep < 1:
        raise ValueError(f"--keep must be at least 1, got {settings.keep}")
    if settings.stop_after_skips < 1:
        raise ValueError(f"--stop-after-skips must be at least 1, got {settings.stop_after_skips}")
    if not 0 <= settings.diagnose_every <= settings.steps:
        raise ValueError(
            f"--diagnose-every must be at most the {settings.steps} steps, got {settings.diagnose_every}; 0 is never"
        )
    if settings.tensorboard:
        scalars.check()
    if settings.vocab_size <= 256:
        raise ValueError(f"--vocab-size must exceed the 256 single bytes, got {settings.vocab_size}")
    if not 0 < settings.learning_rate < math.inf:
        raise ValueError(f"--learning-rate must be a positive number, got {settings.learning_rate}")
    if not 0 <= settings.dropout < 1:
        raise ValueError(f"--dropout must be at least 0 and below 1, got {settings.dropout}; 0 drops nothing")
    if settings.hidden_size < 16 or settings.hidden_size % 16:
        raise ValueError(f"--hidden-size must be a multiple of 16 for FP8 GEMMs, got {settings.hidden_size}")
    if settings.hidden_size % settings.num_heads:
        raise ValueError(f"--num-heads must divide --hidden-size {settings.hidden_size}, got {settings.num_heads}")
    if settings.compare and settings.recipe == "bf16":
        raise ValueError("--compare sets an FP8 recipe beside bf16; choose --recipe delayed, current or block")
    if (settings.fast or settings.fp8_head) and settings.recipe == "bf16":
        raise ValueError(
            "--fast and --fp8-head are about FP8, got --recipe bf16; choose --recipe delayed or --recipe current"
        )
    if settings.fp8_attention and settings.recipe != "delayed":
        raise ValueError(
            f"--fp8-attention casts by scales of earlier steps, got --recipe {settings.recipe}; leave it out, or "
            "choose --recipe delayed"
        )
    if settings.fast and settings.recipe == "block":
        raise ValueError(
            "--fast is for recipes whose GEMMs may add up fast, got --recipe block, which scales the sum of every 128 "
            "products in float32; leave out --fast, or choose --recipe delayed or --recipe current"
        )
    kind, _, layers = settings.remat.partition(":")
    is_count = kind == "offload" and layers.isdecimal() and int(layers) <= settings.num_layers
    if settings.remat not in REMATS and not is_count:
        raise ValueError(
            f"--remat must be none, norms, full, or offload:N with N of {settings.num_layers} layers, "
            f"got {settings.remat!r}; choose one"
        )
    if settings.dropout and kind == "offload":
        raise ValueError("--dropout needs layers that do not run one by one, got --remat offload:N; leave out one")
    if settings.schedule and settings.schedule not in SCHEDULES:
        raise ValueError(f"--schedule must be one of {', '.join(SCHEDULES)}, got {settings.schedule!r}; choose one")
    if settings.chunks < 0:
        raise ValueError(f"--chunks must be 2 or more, got {settings.chunks}; leave it out, which is 2")
    if settings.name != Path(settings.name).name or settings.name == "..":
        raise ValueError(f"--name must be a plain folder name, got {settings.name!r}; choose the folder by --output")
    if settings.batch_size % settings.microbatches:
        raise ValueError(f"--microbatches must divide --batch-size {settings.batch_size}, got {settings.microbatches}")
    parse_steps(settings.profile, settings.steps)
    sequences = settings.batch_size // settings.microbatches
    if sequences * settings.seq_len % 16:
        raise ValueError(
            f"a microbatch must hold a multiple of 16 tokens, got {sequences} x {settings.seq_len}; change --seq-len"
        )
    _check_processes(settings)


def parse_steps(text: str, steps: int) -> range:
    """`20:24` → the steps from 20 to 24; none of an empty text."""
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first <= last <= steps:
        raise ValueError(
            f"--profile must be FIRST:LAST, two of the steps 1 to {steps}, got {text!r}; "
            f"say --profile {min(2, steps)}:{min(5, steps)}"
        )
    return range(first, last + 1)


def _check_processes(settings):
    by_hand = {
        "--coordinator": settings.coordinator or None,
        "--num-processes": settings.num_processes,
        "--process-id": settings.process_id,
    }
    given = [flag for flag, value in by_hand.items() if value is not None]
    if settings.distributed and given:
        raise ValueError(f"--distributed asks the environment for its processes, got also {given[0]}; give one of them")
    if given and len(given) < 3:
        missing = [flag for flag in by_hand if flag not in given]
        raise ValueError(f"{', '.join(by_hand)} belong together, got no {missing[0]}; give all three, or --distributed")
    if not given:
        return
    host, _, port = settings.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"--coordinator must be HOST:PORT of the first process, got {settings.coordinator!r}")
    if settings.num_processes < 1:
        raise ValueError(f"--num-processes must be at least 1, got {settings.num_processes}")
    if not 0 <= settings.process_id < settings.num_processes:
        raise ValueError(f"--process-id must be from 0 to {settings.num_processes - 1}, got {settings.process_id}")
