"""What a run can be told: the command line, the defaults of each model size, and the settings that files have.

--preset → defaults ─or --config FILE→ settings of that run ─flags→ Settings
"""

import dataclasses
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jax_fp8.core.files import Unreadable, shown
from jax_fp8.models.config import GPTConfig
from jax_fp8.report.run_format import is_count, is_number, read_config
from jax_fp8.run import command_line


@dataclasses.dataclass(frozen=True)
class Settings:
    """Train a GPT in FP8 on real text."""

    preset: str = "tiny"
    """Model size; it also chooses the defaults below."""
    config: Path | None = None
    """Repeat the run whose config.json this is; flags given beside it win."""
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
    validation_data: Path | None = None
    """A text file or a folder of them to validate on; by default a twentieth of --data, which is not trained on."""
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
    """Peak of the schedule: linear warmup, then decay."""
    decay: Literal["linear", "cosine", "constant", "warmup-stable-decay"] = "linear"
    """How the learning rate falls after warmup: all the way, not at all, or only in the last --decay-steps."""
    final_learning_rate: float = 0.0
    """Where the decay ends."""
    warmup_steps: int | None = None
    """By default a tenth of all steps, but at most 200."""
    decay_steps: int | None = None
    """With warmup-stable-decay: steps of the decay; by default a fifth of all."""
    weight_decay: float = 0.1
    """Of AdamW: decoupled, in units of the learning rate."""
    b1: float = 0.9
    """Decay of Adam's first moment."""
    b2: float = 0.95
    """Decay of Adam's second moment."""
    eps: float = 1e-8
    """Added to the root of Adam's second moment."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 does not clip."""
    mu_dtype: Literal["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"] = "float32"
    """In which Adam's first moment is kept."""
    nu_dtype: Literal["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"] = "float32"
    """In which Adam's second moment is kept."""
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


OF_THE_MODEL = ("hidden_size", "num_layers", "num_heads")  # which a preset chooses
OF_THE_PROCESS = ("config", "resume", "distributed", "coordinator", "num_processes", "process_id")  # not repeated


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The options that choose the defaults of all others."""

    preset: str | None = None
    config: Path | None = None


def defaults(preset: str) -> Settings:
    """Settings that suit a preset; ValueError names the presets if there is none of this name."""
    model = GPTConfig.preset(preset)
    shape = Settings(preset=preset, **{name: getattr(model, name) for name in OF_THE_MODEL})
    if preset == "tiny":
        return shape
    pairs = dataclasses.replace(shape, tokenizer="bpe", steps=1000, eval_every=100)
    if model.hidden_size <= 1024:
        return dataclasses.replace(pairs, batch_size=32, seq_len=1024, learning_rate=6e-4)
    return dataclasses.replace(pairs, batch_size=8, seq_len=2048, learning_rate=2e-4)


def parse(argv: list[str]) -> Settings:
    """Command line → settings."""
    chosen = command_line.read_part(Chosen, argv)
    if chosen.config is None:
        return command_line.read(Settings, argv, "train", default=defaults(chosen.preset or Settings.preset))
    saved = repeated(chosen.config)
    if chosen.preset not in (None, saved.preset):
        own = defaults(chosen.preset)
        saved = dataclasses.replace(saved, **{name: getattr(own, name) for name in OF_THE_MODEL})
    return dataclasses.replace(command_line.read(Settings, argv, "train", default=saved), config=None)


def repeated(path: Path) -> Settings:
    """The settings of a config.json, to be used for another run."""
    try:
        described = read_config(path)["settings"]
        unknown = sorted(set(described) - {field.name for field in dataclasses.fields(Settings)})
        if unknown:
            raise Unreadable(f"settings that this version does not know: {', '.join(map(shown, unknown))}")
        preset = described.get("preset", Settings.preset)
        if not isinstance(preset, str):
            raise Unreadable(f"settings whose preset is {shown(preset)}")
        own = {name: value for name, value in described.items() if name not in OF_THE_PROCESS}
        return settings_from(own, defaults(preset))
    except ValueError as error:
        raise ValueError(f"--config must be the config.json of a run of this version, got {error} in {path}") from None


def settings_from(described: Mapping[str, Any], others: Settings | None = None) -> Settings:
    """The settings that JSON describes. Those that it lacks are as in `others`, those that are unknown are left out;
    ValueError, in words that fit after "got", where one has another type.
    """
    kinds, found = get_type_hints(Settings), {}
    for name in kinds.keys() & described.keys():
        if not _holds(kinds[name], described[name]):
            raise ValueError(f"settings whose {name} is {shown(described[name])}")
        found[name] = _converted(kinds[name], described[name])
    return dataclasses.replace(others or Settings(), **found)


def describe(settings: Settings) -> dict[str, Any]:
    """As JSON has them."""
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))


def _holds(kind: Any, value: Any) -> bool:
    """Whether a value of JSON is one of this type."""
    if get_origin(kind) is types.UnionType:
        return any(_holds(one, value) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind is types.NoneType:
        return value is None
    if kind is float:
        return is_number(value)
    if kind is int:
        return is_count(value)
    return isinstance(value, str if kind is Path else kind)


def _converted(kind: Any, value: Any) -> Any:
    if isinstance(value, str) and Path in (kind, *get_args(kind)):
        return Path(value)
    return float(value) if kind is float else value
