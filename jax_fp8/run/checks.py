"""Checks of a run's settings, before anything is computed: each raises a ValueError of one sentence.

The library itself refuses a mesh that cannot split the model and a schedule that cannot run, as soon as job.py makes
the step. The checks here are those that the library would only do when it traces the step, and those of the command
line, the text and the processes, which the library does not know.
"""

import math
import re
from importlib.util import find_spec
from pathlib import Path

from jax.sharding import Mesh

from jax_fp8.models.config import GPTConfig
from jax_fp8.parallel.mesh import AXES, parse_axes
from jax_fp8.run.batches import Batches, Packed
from jax_fp8.run.settings import OF_THE_MODEL, Settings

AT_LEAST = {"steps": 1, "batch_size": 1, "seq_len": 1, "microbatches": 1, "eval_every": 1, "num_layers": 1,
            "num_heads": 1, "keep": 1, "stop_after_skips": 1, "sample_tokens": 0, "checkpoint_every": 0, "chunks": 0,
            "vocab_size": 257, "lora": 0}  # fmt: skip


def check(settings: Settings) -> None:
    """Raise for settings that no device and no text could be trained with."""
    if settings.init_from is not None:
        _check_no_shape(settings)
    for field, least in AT_LEAST.items():
        if settings.init_from is not None and field in OF_THE_MODEL:
            continue
        if (value := getattr(settings, field)) < least:
            raise ValueError(f"--{field.replace('_', '-')} must be at least {least}, got {value}")
    if not 0 <= settings.seed < 2**63:
        raise ValueError(f"--seed must be from 0 to 2**63 - 1, got {settings.seed}")
    if not 0 <= settings.diagnose_every <= settings.steps:
        raise ValueError(
            f"--diagnose-every must be at most the {settings.steps} steps, got {settings.diagnose_every}; 0 is never"
        )
    if settings.tensorboard and find_spec("tensorboardX") is None:
        raise ValueError("--tensorboard needs tensorboardX, which is not installed; pip install tensorboardX")
    if settings.init_from is None and (settings.hidden_size < 16 or settings.hidden_size % 16):
        raise ValueError(f"--hidden-size must be a multiple of 16 for FP8 GEMMs, got {settings.hidden_size}")
    if settings.name != Path(settings.name).name or settings.name == "..":
        raise ValueError(f"--name must be a plain folder name, got {settings.name!r}; choose the folder with --output")
    parse_steps(settings.profile, settings.steps)
    _check_recipe(settings)
    _check_trained(settings)
    _check_processes(settings)
    _check_data(settings)


def parse_steps(text: str, steps: int) -> range:
    """`20:24` → the steps from 20 to 24; an empty text has no steps."""
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last <= steps:
        raise ValueError(
            f"--profile must be FIRST:LAST, two of the steps 1 to {steps}, got {text!r}; "
            f"say --profile {min(2, steps)}:{min(5, steps)}"
        )
    return range(first, last + 1)


def _check_no_shape(settings: Settings) -> None:
    """Raise where the shape of the model is said twice."""
    for field in ("preset", *OF_THE_MODEL):
        if value := getattr(settings, field):
            raise ValueError(
                f"--init-from has the shape of the model, got also --{field.replace('_', '-')} {value}; leave one out"
            )
    if settings.tokenizer == "bpe":
        raise ValueError(
            "--tokenizer bpe learns other tokens than those that the model of --init-from knows; leave it out to take "
            "the tokenizer of the model"
        )


def _check_data(settings: Settings) -> None:
    """Raise where options of the data do not fit together."""
    if settings.tokenizer == "" and settings.init_from is None:
        raise ValueError(
            "--tokenizer must be bytes, bpe, a tokenizer.json or a folder that has one, got none; name one"
        )
    if settings.chat and settings.text_field:
        raise ValueError(
            f"--chat reads conversations from the field messages, got also --text-field {settings.text_field}; leave "
            "one out"
        )
    if settings.chat and settings.tokenizer in ("bytes", "bpe"):
        raise ValueError(
            f"--chat needs a tokenizer with a chat template, got --tokenizer {settings.tokenizer}; name the folder of "
            "a model that answers"
        )
    if settings.pack and not settings.text_field:
        raise ValueError(
            "--pack keeps the documents of --text-field whole, got none; leave it out: conversations of --chat are "
            "always whole, and text files are one stream"
        )
    if (settings.chat or settings.text_field) and settings.data is None:
        raise ValueError("--chat and --text-field are for files of records, got no --data; name a .jsonl or .parquet")
    if not (settings.chat or settings.pack):
        return
    option = "--chat" if settings.chat else "--pack"
    if settings.fp8_attention:
        raise ValueError(f"attention in FP8 has no documents, got --fp8-attention and {option}; leave one of them out")
    if parse_axes(settings.mesh).get("pipe", 1) > 1 or settings.remat.startswith("offload"):
        raise ValueError(
            f"{option} packs documents into sequences, which pipe and --remat offload:N cannot run, got --mesh "
            f"{settings.mesh} and --remat {settings.remat}; use another mesh or remat"
        )


def check_start(settings: Settings, model: GPTConfig, tokens: int) -> None:
    """Raise unless a run can begin with this model.

    Args:
      tokens: in the vocabulary of the tokenizer.
    """
    if settings.seq_len > model.max_seq_len:
        raise ValueError(
            f"--seq-len must be at most the {model.max_seq_len} tokens that the model of --init-from reads, got "
            f"{settings.seq_len}; make it smaller"
        )
    if tokens > model.vocab_size:
        raise ValueError(
            f"--tokenizer must have at most the {model.vocab_size} tokens of the model of --init-from, got {tokens}; "
            "name the tokenizer of the model"
        )


def _check_recipe(settings: Settings) -> None:
    if settings.recipe == "bf16" and settings.compare:
        raise ValueError(
            "--compare trains an FP8 recipe and bf16, got --recipe bf16; choose --recipe delayed, current or block"
        )
    if settings.recipe == "bf16" and (settings.fast or settings.fp8_head):
        raise ValueError(
            "--fast and --fp8-head need an FP8 recipe, got --recipe bf16; choose --recipe delayed or --recipe current"
        )
    if settings.fp8_attention and settings.recipe != "delayed":
        raise ValueError(
            f"--fp8-attention casts with scales from earlier steps, got --recipe {settings.recipe}; leave it out, or "
            "choose --recipe delayed"
        )
    if settings.fp8_attention and settings.seq_len % 128:
        raise ValueError(
            f"--fp8-attention needs --seq-len to be a multiple of 128, got {settings.seq_len}; change it, or leave "
            "--fp8-attention out"
        )


def _check_trained(settings: Settings) -> None:
    """Raise where options of adapters and of frozen params do not fit together."""
    if settings.lora_alpha is not None and not settings.lora:
        raise ValueError(f"--lora-alpha is for --lora, got {settings.lora_alpha} without it; add --lora, such as 16")
    if settings.lora_alpha is not None and not 0 < settings.lora_alpha < math.inf:
        raise ValueError(
            f"--lora-alpha must be a positive number, got {settings.lora_alpha}; leave it out for the rank"
        )
    if settings.lora and settings.init_from is None:
        raise ValueError(
            f"--lora trains adapters of a model that has learned already, got --lora {settings.lora} without "
            "--init-from; name the model"
        )
    if settings.lora and settings.freeze:
        raise ValueError("--lora freezes all params but the adapters, got --freeze too; leave one of them out")
    try:
        re.compile(settings.freeze)
    except re.error as error:
        raise ValueError(
            f"--freeze must be a regular expression, as for re.search, got {settings.freeze!r}: {error}"
        ) from None


def _check_processes(settings: Settings) -> None:
    by_hand = {
        "--coordinator": settings.coordinator or None,
        "--num-processes": settings.num_processes,
        "--process-id": settings.process_id,
    }
    flags = [flag for flag, value in by_hand.items() if value is not None]
    if settings.distributed and flags:
        raise ValueError(
            f"--distributed reads the processes from the environment, got also {flags[0]}; give one of them"
        )
    if not flags:
        return
    num_processes, process_id = settings.num_processes, settings.process_id
    if not settings.coordinator or num_processes is None or process_id is None:
        missing = next(flag for flag in by_hand if flag not in flags)
        raise ValueError(f"{', '.join(by_hand)} belong together, got no {missing}; give all three, or --distributed")
    host, _, port = settings.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"--coordinator must be HOST:PORT of the first process, got {settings.coordinator!r}")
    if num_processes < 1:
        raise ValueError(f"--num-processes must be at least 1, got {num_processes}")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"--process-id must be from 0 to {num_processes - 1}, got {process_id}")


def check_on_mesh(settings: Settings, mesh: Mesh, model: GPTConfig) -> None:
    """Raise unless each device gets equal parts of a batch and of the model."""
    stages, data, fsdp, expert, tensor = (mesh.shape[axis] for axis in AXES)
    of_batch = data * fsdp * expert
    parts = of_batch * settings.microbatches
    if settings.batch_size % parts:
        raise ValueError(
            f"--batch-size must be a multiple of {parts}, data x fsdp x expert = {of_batch} parts of each of "
            f"{settings.microbatches} microbatches, got {settings.batch_size}; change it, --microbatches or --mesh"
        )
    if model.num_experts % expert:
        raise ValueError(
            f"--mesh with expert={expert} must divide the model's {model.num_experts} experts, got --mesh "
            f"{settings.mesh}; choose another size of that axis"
        )
    sequences = settings.batch_size // parts
    if sequences * settings.seq_len % 16:
        raise ValueError(
            f"each device must have a multiple of 16 tokens of a microbatch, got {sequences} x {settings.seq_len}; "
            "change --seq-len"
        )
    if settings.sequence_parallel and settings.seq_len % tensor:
        raise ValueError(
            f"--sequence-parallel with tensor={tensor} must divide a sequence, got --seq-len {settings.seq_len}; "
            "change one of them"
        )
    if settings.gradient_dtype != "float32" and stages * of_batch == 1:
        raise ValueError(
            "--gradient-dtype needs a mesh with data, fsdp, expert or pipe to sum gradients over, got --mesh "
            f"{settings.mesh}; add one of them"
        )
    if settings.fp8_attention and stages > 1:
        raise ValueError(
            f"a pipeline computes attention in bfloat16, got --fp8-attention and --mesh {settings.mesh}; "
            "leave out --fp8-attention, or pipe"
        )
    if settings.lora and stages > 1:
        raise ValueError(
            f"--lora runs over data, fsdp and tensor, because a pipeline cannot carry frozen kernels, got --mesh "
            f"{settings.mesh}; use another mesh"
        )
    _check_widths(settings, model, tensor, stages * fsdp * tensor)


def _check_widths(settings: Settings, model: GPTConfig, tensor: int, parts: int) -> None:
    """Raise unless the part of each width that a device has is a multiple of 16, as FP8 GEMMs need it, or of 128 with
    the recipe block: in validation each device casts its own part of a kernel, which must be whole tiles.

    Args:
      tensor: devices of the mesh's axis `tensor`.
      parts: into which params are split, over `pipe`, `fsdp` and `tensor`.
    """
    if tensor == 1 and (settings.recipe != "block" or parts == 1):
        return
    split, unit = (parts, 128) if settings.recipe == "block" else (tensor, 16)
    # With fewer heads of keys and values than devices, each device has all of them.
    kv_parts = tensor if model.kv_heads % tensor == 0 or settings.recipe == "block" else 1
    widths = {
        "--hidden-size": (model.hidden_size, split),
        "the width of the MLP": (model.mlp_hidden_size or 4 * model.hidden_size, split),
        "the width of queries": (model.features_of_head * model.num_heads, split),
        "the width of keys and values": (model.features_of_head * model.kv_heads, kv_parts),
    }
    for name, (width, devices) in widths.items():
        if width % (unit * devices):
            raise ValueError(
                f"{name} must be a multiple of {unit * devices} with --recipe {settings.recipe} and --mesh "
                f"{settings.mesh}, {unit} on each device, got {width}; change one of them"
            )
    if settings.fp8_head and model.vocab_size % (16 * tensor):
        raise ValueError(
            f"the vocabulary must be a multiple of {16 * tensor} with --fp8-head and tensor={tensor}, got "
            f"{model.vocab_size} tokens; change --mesh, or leave out --fp8-head"
        )


def check_size(train: Batches, held_out: Batches, settings: Settings) -> None:
    """Raise if the data is too small for one batch, or for validation."""
    if isinstance(train, Packed) and isinstance(held_out, Packed):
        _check_rows(len(train.rows), len(held_out.rows), settings)
    else:
        check_length(train.size, held_out.size, settings)


def _check_rows(train: int, held_out: int, settings: Settings) -> None:
    if train < settings.batch_size:
        raise ValueError(
            f"--data must fill at least one batch of {settings.batch_size} sequences of --seq-len {settings.seq_len}, "
            f"got {train}; give more documents, or a smaller --batch-size or --seq-len"
        )
    if not held_out:
        where = "--data must leave" if settings.validation_data is None else "--validation-data must hold"
        raise ValueError(
            f"{where} a document with something to learn for validation, got none; give more documents, or "
            "--validation-data"
        )


def check_length(train: int, held_out: int, settings: Settings) -> None:
    """Raise if the text has too few tokens for one batch, or for validation."""
    needed = settings.batch_size * settings.seq_len + 1
    if train < needed:
        raise ValueError(
            f"--data must hold at least one batch of {needed:,} tokens to train on, got {train:,}; "
            "give more text, or a smaller --batch-size or --seq-len"
        )
    if held_out <= settings.seq_len:
        where = "--data must leave" if settings.validation_data is None else "--validation-data must hold"
        raise ValueError(
            f"{where} {settings.seq_len + 1:,} tokens for validation, got {held_out:,}; give more text, or a smaller "
            "--seq-len"
        )
