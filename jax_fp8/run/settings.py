"""The settings of a run: the options of its command line, their defaults for each model size, and settings in files.

--preset → its defaults, or --config FILE → the settings of that run; then ─flags→ Settings

The docstrings of the fields of `Settings` are the texts of `python -m jax_fp8 train --help`.
"""

import dataclasses
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from jax_fp8.core.files import Unreadable, shown
from jax_fp8.models.config import GPTConfig
from jax_fp8.report.run_format import JsonObject, is_count, is_number, is_text, read_config
from jax_fp8.run import command_line


@dataclasses.dataclass(frozen=True)
class Settings:
    """Train a GPT in FP8 on real text."""

    preset: str = "tiny"
    """Model size; it also chooses the defaults of the other options."""
    config: Path | None = None
    """Take all settings from a run's config.json, to repeat that run; other flags override them."""
    recipe: Literal["delayed", "current", "block", "bf16"] = "delayed"
    """How FP8 scales are computed: from earlier steps, from each tensor, or from blocks of it; bf16 has no FP8."""
    fast: bool = False
    """Use fast accumulation in all GEMMs of the layers; by default gradients use split accumulation. Not with block."""
    fp8_head: bool = False
    """Compute the output head in FP8, too."""
    fp8_attention: bool = False
    """Compute attention in FP8, too, for long sequences; needs heads of 128 features, and --recipe delayed."""
    compare: bool = False
    """Train in bfloat16, too, from the same parameters and on the same batches, and plot both losses."""
    init_from: Path | None = None
    """Begin with the model of a Hugging Face folder, of a file of params, or of a run of --output: its shape, its
    params and its tokenizer."""
    freeze: str = ""
    """Do not train the params whose path this regular expression is found in, such as "embedding|head"."""
    lora: int = 0
    """With --init-from, train adapters (LoRA) of this rank on all linear layers, and freeze the model. Its kernels are
    kept in FP8, one byte each; with --recipe bf16 in --param-dtype. 0 trains the model itself."""
    lora_alpha: float | None = None
    """The adapters are multiplied by this number, divided by their rank; by default it is the rank."""
    data: Path | None = None
    """A file, or a folder of files: text, .jsonl or .parquet with --text-field or --chat, or .bin with numbers of
    tokens; by default the sources of Python's standard library."""
    validation_data: Path | None = None
    """A file, or a folder of files, of the same kind, to validate on; by default a twentieth of --data, held out."""
    text_field: str = ""
    """The field of .jsonl or .parquet that has the text of a document."""
    chat: bool = False
    """The field `messages` of .jsonl or .parquet has a conversation; only what the assistant wrote is learned."""
    pack: bool = False
    """With --text-field: keep documents whole, several in a sequence, which do not see each other; by default the text
    of all documents is one stream, which sequences are cut from."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """The numbers in .bin files."""
    tokenizer: str = "bytes"
    """One token a byte (bytes), byte-pair encoding learnt from the training text and cached (bpe), or a tokenizer.json
    or its folder; with --init-from that of the model by default."""
    vocab_size: int = 16384
    """Size of bpe's vocabulary, at most."""
    steps: int = 450
    """Number of optimizer steps."""
    batch_size: int = 8
    """Sequences in a step, of all devices together."""
    seq_len: int = 128
    """Tokens in a sequence."""
    microbatches: int = 1
    """Split each batch into this many microbatches to save memory; gradients are accumulated over them."""
    learning_rate: float = 1e-3
    """Peak learning rate, after the linear warmup."""
    decay: Literal["linear", "cosine", "constant", "warmup-stable-decay"] = "linear"
    """How the learning rate decays after warmup; warmup-stable-decay decays only in the last --decay-steps."""
    final_learning_rate: float = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: int | None = None
    """Steps of the linear warmup; by default a tenth of all steps, but at most 200."""
    decay_steps: int | None = None
    """Steps of the decay with warmup-stable-decay; by default a fifth of all steps."""
    weight_decay: float = 0.1
    """AdamW's decoupled weight decay; it is multiplied by the learning rate."""
    b1: float = 0.9
    """Decay rate of Adam's first moment."""
    b2: float = 0.95
    """Decay rate of Adam's second moment."""
    eps: float = 1e-8
    """Added to the square root of Adam's second moment."""
    max_grad_norm: float = 1.0
    """Clip gradients to this global norm; 0 does not clip."""
    mu_dtype: Literal["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"] = "float32"
    """Dtype in which Adam's first moment is stored."""
    nu_dtype: Literal["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"] = "float32"
    """Dtype in which Adam's second moment is stored."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the parameters; the optimizer keeps float32 masters of bfloat16 ones."""
    dropout: float = 0.0
    """Dropout rate of the embeddings and of the outputs of attention and MLP; GPT-2 has 0.1."""
    seed: int = 0
    """Random seed of parameters, data order, dropout and sample."""
    remat: str = "none"
    """What layers keep for the backward pass: none (keep all), norms (compute norms and activations again), full (keep
    only each layer's input), or offload:N (keep all, and that of N layers in the host's memory)."""
    mesh: str = "data=1"
    """Devices by axis, such as data=2,tensor=4. data splits the batch, fsdp batch and params, tensor each layer; pipe
    makes pipeline stages, each with a part of the layers."""
    sequence_parallel: bool = False
    """Between layers, split the tokens over the axis tensor."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients are summed over data and fsdp, and sent over pipe; bfloat16 sends half the bytes."""
    schedule: str = ""
    """Pipeline schedule, with pipe: 1f1b (the default), gpipe, interleaved or zero-bubble."""
    chunks: int = 0
    """Chunks of layers on each pipeline stage, with --schedule interleaved; 0 means 2."""
    distributed: bool = False
    """Run as one of several processes, which Slurm, Open MPI or Kubernetes describe to jax."""
    coordinator: str = ""
    """Run as one of several processes, without such an environment: HOST:PORT of the first process."""
    num_processes: int | None = None
    """Number of processes, with --coordinator."""
    process_id: int | None = None
    """Index of this process from 0, with --coordinator; process 0 writes and prints."""
    hidden_size: int = 0
    """Width of the model, in features; by default the preset's."""
    num_layers: int = 0
    """Number of layers; by default the preset's."""
    num_heads: int = 0
    """Attention heads in a layer; by default the preset's."""
    eval_every: int = 50
    """Steps between two validations."""
    checkpoint_every: int = 0
    """Steps between two checkpoints, from which --resume continues; 0 saves none."""
    keep: int = 2
    """Number of checkpoints to keep; older ones are removed."""
    resume: str = ""
    """Resume this run of --output from its last checkpoint, whatever --name is; auto resumes the last run of this name,
    or begins it."""
    skip_spikes: bool = False
    """Skip steps whose loss is far above earlier losses. Steps with a loss that is not finite are always skipped."""
    stop_after_skips: int = 3
    """End the run when this many steps in a row were skipped."""
    diagnose_every: int = 0
    """Steps between two diagnosed steps, whose FP8 tensors and gradients are logged; 0 diagnoses only skipped steps."""
    tensorboard: bool = False
    """Write the logs for TensorBoard, too."""
    profile: str = ""
    """FIRST:LAST writes a jax.profiler trace of these steps; step 1 would be mostly compilation."""
    sample_tokens: int = 256
    """Tokens of the text that is generated after training; 0 generates none."""
    export: Path | None = None
    """Write the trained model to this new folder at the end, in the format of Hugging Face, with its tokenizer."""
    export_dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Dtype of the exported parameters; by default that in which they are trained."""
    name: str = ""
    """Name of the run's folder; by default the preset and the recipe."""
    output: Path = Path("runs")
    """The folder in which run folders are created."""
    cache: Path = Path.home() / ".cache" / "jax_fp8"
    """The folder in which trained tokenizers, and the tokens of .jsonl and .parquet files, are cached."""


OF_THE_MODEL = ("hidden_size", "num_layers", "num_heads")  # a preset chooses them, or --init-from
# --config does not repeat these.
OF_THE_PROCESS = ("config", "resume", "distributed", "coordinator", "num_processes", "process_id")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The options on which the defaults of all others depend."""

    preset: str | None = None
    config: Path | None = None
    init_from: Path | None = None


def defaults_of_start(path: Path) -> Settings:
    """The default settings of a run that begins with this model, which decides its shape and its tokenizer."""
    return Settings(
        preset="", init_from=path, tokenizer="", steps=1000, eval_every=100, seq_len=1024, learning_rate=2e-5
    )


def defaults(preset: str) -> Settings:
    """The default settings of a preset; for an unknown one, a ValueError that names the presets."""
    model = GPTConfig.preset(preset)
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
    """The settings of a command line."""
    chosen = command_line.read_part(Chosen, argv)  # their values decide the defaults for the second reading
    if chosen.config is None:
        start = defaults_of_start(chosen.init_from) if chosen.init_from else defaults(chosen.preset or Settings.preset)
        return command_line.read(Settings, argv, "train", default=start)
    saved = repeated(chosen.config)
    if chosen.init_from is not None and saved.init_from is None:
        own = defaults_of_start(chosen.init_from)
        saved = dataclasses.replace(saved, **{name: getattr(own, name) for name in ("preset", *OF_THE_MODEL)})
    elif chosen.preset not in (None, saved.preset) and saved.init_from is None:
        own = defaults(chosen.preset)
        saved = dataclasses.replace(saved, **{name: getattr(own, name) for name in OF_THE_MODEL})
    return dataclasses.replace(command_line.read(Settings, argv, "train", default=saved), config=None)


def repeated(path: Path) -> Settings:
    """The settings of a config.json, for another run."""
    try:
        described = read_config(path)["settings"]
        unknown = sorted(set(described) - {field.name for field in dataclasses.fields(Settings)})
        if unknown:
            raise Unreadable(f"settings that this version does not know: {', '.join(map(shown, unknown))}")
        preset = described.get("preset", Settings.preset)
        if not isinstance(preset, str):
            raise Unreadable(f"settings whose preset is {shown(preset)}")
        repeated_ones = {name: value for name, value in described.items() if name not in OF_THE_PROCESS}
        start = described.get("init_from")
        return settings_from(repeated_ones, defaults_of_start(Path(start)) if is_text(start) else defaults(preset))
    except ValueError as error:
        raise ValueError(f"--config must be the config.json of a run of this version, got {error} in {path}") from None


def settings_from(described: Mapping[str, object], others: Settings | None = None) -> Settings:
    """The settings that a JSON object has. A setting that it lacks is taken from `others`; an unknown one is ignored.

    Raises:
      ValueError: in words that fit after "got", if a value has the wrong type.
    """
    hints, values = get_type_hints(Settings), {}
    for name in hints.keys() & described.keys():
        if not _is_of_type(hints[name], described[name]):
            raise ValueError(f"settings whose {name} is {shown(described[name])}")
        values[name] = _converted(hints[name], described[name])
    return dataclasses.replace(others or Settings(), **values)


def describe(settings: Settings) -> JsonObject:
    """The settings as a JSON object."""
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))


def _is_of_type(hint: object, value: object) -> bool:
    """Whether a value of JSON has the type of this hint."""
    if get_origin(hint) is types.UnionType:
        return any(_is_of_type(one, value) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if hint is types.NoneType:
        return value is None
    if hint is float:
        return is_number(value)
    if hint is int:
        return is_count(value)
    return isinstance(value, bool) if hint is bool else isinstance(value, str)


def _converted(hint: object, value: object) -> object:
    """A value of JSON as the type of this hint."""
    if isinstance(value, str) and Path in (hint, *get_args(hint)):
        return Path(value)
    return float(value) if hint is float and isinstance(value, int | float) else value
