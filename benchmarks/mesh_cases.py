"""The cases of `meshes.py`: a GPT on a mesh, in jax_fp8 or in plain Flax, and its training step."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from mesh_plain import build_plain, constraint
from plain_gpt import PlainGPT

import jax_fp8 as fp8
from jax_fp8.parallel.mesh import BATCH_AXES, DATA, EXPERT, FSDP, PIPE, TENSOR, parse_axes
from jax_fp8.parallel.schedule import Schedule
from jax_fp8.parallel.schedules import layers_of_stage, make_schedule
from jax_fp8.train.cuda_graph import default_options

REMAT = ("none", "norms", "full")
RECIPES = ("delayed", "current", "block", "bf16", "plain")
GRAPHS = ("default", "collectives", "none")
SEQUENCE = "+sequence"
COMMANDS = "xla_gpu_enable_command_buffer"


def axes_of(mesh: str) -> dict[str, int]:
    return parse_axes(mesh.removesuffix(SEQUENCE))


def has_stages(mesh: str) -> bool:
    return axes_of(mesh).get(PIPE, 1) > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training run.

    Args:
      mesh: `data=2,tensor=2`; with `+sequence` at its end, sequence parallel. `expert` needs a preset with experts.
      recipe: delayed, current, block, bf16 (jax_fp8 without FP8) or plain (plain Flax, automatic sharding).
      batch: sequences of a step, of all devices together. 0 means `batch_per_data` for each part of a batch: in every
        microbatch without `pipe`; with `pipe` for each stage, in all microbatches together, so that pipe=4 has the
        work of data=4.
      batch_per_data: 0 means 8; with `tensor` 4 for each of its devices, if that is more.
      microbatches: of a step; 0 means 1, or with `pipe` 4 for each stage.
      seq_len, num_layers, vocab_size: 0 keeps the preset's.
      fast, fp8_head, param_dtype: fast accumulation in all GEMMs, the head in FP8, and the dtype of params; only for
        delayed and current.
      fp8_attention: attention in FP8, too; only for delayed.
      remat: as a `GPT` takes it; not for plain.
      cold: no warm start, which is a program of its own; the first step has scales of 1.
      pieces: one call of `accumulate_step` for each microbatch; not for plain.
      cache_weights: False casts and gathers weights in every microbatch.
      graphs: default, as the step itself is compiled; collectives in CUDA graphs, too; or none.
      options: of XLA, which replace all others.
      gemms: a file of tuned GEMMs, or "".
      schedule, chunks: of a pipeline; "" and 0 mean the step's defaults.
    """

    mesh: str
    recipe: str = "delayed"
    preset: str = "gpt3-1.3b"
    batch: int = 0
    batch_per_data: int = 0
    microbatches: int = 0
    seq_len: int = 0
    num_layers: int = 0
    vocab_size: int = 0
    fast: bool = False
    fp8_head: bool = False
    fp8_attention: bool = False
    param_dtype: str = "float32"
    remat: str = "none"
    gradient_dtype: str = ""
    cold: bool = False
    pieces: bool = False
    cache_weights: bool = True
    graphs: str = "default"
    options: dict = dataclasses.field(default_factory=dict)
    gemms: str = ""
    schedule: str = ""
    chunks: int = 0

    def __post_init__(self):
        if self.sequence_parallel and self.size(TENSOR) == 1:
            raise ValueError(f"{SEQUENCE} needs the axis tensor, got {self.mesh}; add it, or leave {SEQUENCE} out")
        if self.pieces and self.recipe == "plain":
            raise ValueError("pieces must be those of a step of jax_fp8, got plain Flax; choose another recipe")
        self._check_experts()
        self._check_pipeline()
        multiple = self.num_microbatches * self.parts
        if self.sequences % multiple:
            raise ValueError(
                f"a step must have as many sequences in each part of each microbatch, got {self.sequences} for "
                f"{self.num_microbatches} microbatches on {self.mesh}; pass a multiple of {multiple} as --batch"
            )

    def _check_experts(self):
        experts = self.config.num_experts
        if experts and self.recipe == "plain":
            raise ValueError(f"plain has no experts, got {self.preset}; choose another recipe or preset")
        if self.size(EXPERT) > 1 and not experts:
            raise ValueError(f"the axis expert needs a preset with experts, got {self.preset}; choose another")

    def _check_pipeline(self):
        if self.stages == 1 and (self.schedule or self.chunks):
            raise ValueError(
                f"a schedule and chunks are about the axis pipe, got {self.mesh}; add it, or leave them out"
            )
        if self.stages > 1 and self.recipe == "plain":
            raise ValueError(f"plain has no pipeline, got {self.mesh}; leave out the axis pipe, or take another recipe")
        if self.pipeline is not None:
            layers_of_stage(0, self.config.num_layers, self.stages, self.pipeline.chunks)  # raises unless it divides

    @property
    def axes(self) -> dict[str, int]:
        return axes_of(self.mesh)

    @property
    def sequence_parallel(self) -> bool:
        return self.mesh.endswith(SEQUENCE)

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    def size(self, axis: str) -> int:
        """Devices along an axis; 1 where there is none."""
        return self.axes.get(axis, 1)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in BATCH_AXES if self.size(axis) > 1)

    @property
    def parts(self) -> int:
        """Into how many parts the mesh splits a batch."""
        return math.prod(map(self.size, BATCH_AXES))

    @property
    def stages(self) -> int:
        """Pipeline stages; 1 means no pipeline."""
        return self.size(PIPE)

    @property
    def num_microbatches(self) -> int:
        return self.microbatches or (4 * self.stages if self.stages > 1 else 1)

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        per_part = self.batch_per_data or max(8, 4 * self.size(TENSOR))
        times = self.num_microbatches if self.stages == 1 else self.stages
        return self.batch or per_part * self.parts * times

    @property
    def pipeline(self) -> Schedule | None:
        """The schedule of the stages; None without a pipeline."""
        if self.stages == 1:
            return None
        name = self.schedule or "1f1b"
        return make_schedule(
            name, self.stages, self.num_microbatches, self.chunks or (2 if name == "interleaved" else 1)
        )

    @property
    def config(self) -> fp8.GPTConfig:
        given = {"max_seq_len": self.seq_len, "num_layers": self.num_layers, "vocab_size": self.vocab_size}
        return fp8.GPTConfig.preset(self.preset, **{name: value for name, value in given.items() if value})

    @property
    def name(self) -> str:
        """The recipe, and the options that differ from their defaults, in words."""
        in_fp8 = {
            "fast": self.fast and self.recipe != "block",
            "FP8 head": self.fp8_head,
            "FP8 attention": self.fp8_attention and self.recipe == "delayed",
            f"{self.param_dtype} params": self.param_dtype != "float32",
        }
        said = {**(in_fp8 if self.in_fp8 else {}), f"remat {self.remat}": self.remat != "none"}
        said |= {f"{self.gradient_dtype} gradients": bool(self.gradient_dtype), "tuned": bool(self.gemms)}
        said |= {"pieces": self.pieces, "weights not kept": not self.cache_weights}
        if self.pipeline is not None:
            chunks = self.pipeline.chunks
            said[f"{self.schedule or '1f1b'}{f' with {chunks} chunks' if chunks > 1 else ''}"] = True
        said[f"{self.num_microbatches} microbatches"] = self.num_microbatches > 1
        return ", ".join([self.recipe, *(words for words, holds in said.items() if holds and self.recipe != "plain")])

    @property
    def in_fp8(self) -> bool:
        return self.recipe in ("delayed", "current", "block")

    @property
    def compiler_options(self) -> dict:
        """XLA's options; empty if this case sets none, so that the step uses its own."""
        ours = {} if self.recipe == "plain" or jax.default_backend() != "gpu" else default_options(on_mesh=True)
        plain = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"  # XLA's defaults, about
        graphs = {
            "default": {},
            "collectives": {COMMANDS: f"{ours.get(COMMANDS, plain)},COLLECTIVES"},
            "none": {COMMANDS: ""},
        }[self.graphs]
        return {**ours, **graphs, **self.options}


@dataclasses.dataclass
class Training:
    """A training step and its initial state. `step(state, batch)` returns a new state and `{"loss"}`; `place` puts
    tokens on the mesh, as a tuple of microbatches for `pieces`. `shapes` are those of `make_state()`.
    """

    step: Callable
    make_state: Callable[[], Any]
    shapes: Any
    place: Callable[[np.ndarray], Any]
    num_params: int


def make_optimizer(recipe: str, steps: int) -> optax.GradientTransformation:
    """AdamW: with a constant learning rate for 0 steps; for a run on text with a schedule and clipped gradients."""
    adamw = optax.adamw if recipe == "plain" else fp8.fused_adamw
    own = {} if recipe == "plain" else {"master_dtype": "remainder"}  # of float32 params nothing is kept apart
    if not steps:
        return adamw(1e-4, weight_decay=0.1, **own)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-4, max(1, steps // 10), steps)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw(schedule, b2=0.95, weight_decay=0.1, **own))


def make_mesh(case: Case, kind: AxisType) -> Mesh:
    devices = jax.devices()
    if len(devices) < case.devices:
        raise ValueError(f"{case.mesh} needs {case.devices} devices, got {len(devices)}; choose a smaller mesh")
    sizes = tuple(case.axes.values())
    return jax.make_mesh(sizes, tuple(case.axes), (kind,) * len(sizes), devices=devices[: case.devices])


def build(case: Case, text_steps: int = 0) -> Training:
    """The training step of a case, before its state is made."""
    tx, config = make_optimizer(case.recipe, text_steps), case.config
    tokens = np.zeros(
        (case.sequences // case.num_microbatches, config.max_seq_len), np.int32
    )  # only their shape counts
    if case.recipe == "plain":
        mesh = make_mesh(case, AxisType.Auto)
        names = ("vocab_size", "num_layers", "num_heads", "hidden_size", "max_seq_len")
        constrain = constraint(mesh, case.batch_axes, case.sequence_parallel)
        model = PlainGPT(**{name: getattr(config, name) for name in names}, constrain=constrain)
        step, make, shapes = build_plain(model, tx, mesh, tokens, case.num_microbatches, case.compiler_options)
        params = shapes[0]["params"]
    else:
        mesh = make_mesh(case, AxisType.Explicit)
        step, make, shapes = _build_ours(case, tx, mesh, tokens)
        params = shapes.params
    placed = NamedSharding(mesh, PartitionSpec(case.batch_axes) if case.batch_axes else PartitionSpec())
    num_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    if not case.pieces:
        return Training(step, make, shapes, lambda batch: jax.device_put(batch, placed), num_params)
    pieces = [np.s_[i :: case.num_microbatches] for i in range(case.num_microbatches)]
    place = lambda batch: tuple(jax.device_put(batch[rows], placed) for rows in pieces)  # noqa: E731
    return Training(_driven(step), make, shapes, place, num_params)


def _driven(step: Any) -> Callable:
    """`run(state, batch)` for a tuple of microbatches, with one call for each."""
    pending = None

    def run(state, batch):
        nonlocal pending
        pending = step.start(state) if pending is None else pending
        for i, microbatch in enumerate(batch):
            pending = step.accumulate_step(state, pending, microbatch, is_first_microbatch=i == 0)
        state, pending, metrics = step.apply_step(state, pending)
        return state, metrics

    return run


def _build_ours(case, tx, mesh, tokens):
    accumulation = {"split_accumulator": ()} if case.fast else {}
    recipe = {
        "delayed": fp8.DelayedScaling(**accumulation),
        "current": fp8.CurrentScaling(**accumulation),
        "block": fp8.BlockScaling(),
        "bf16": None,
    }[case.recipe]
    head = fp8.BlockScaling() if case.recipe == "block" else fp8.CurrentScaling()
    model = fp8.GPT(
        case.config,
        recipe=recipe,
        head_recipe=head if case.fp8_head and case.in_fp8 else None,
        fp8_attention=case.fp8_attention and case.recipe == "delayed",
        param_dtype=jnp.dtype(case.param_dtype) if case.in_fp8 else jnp.float32,
        remat=case.remat,
    )
    parallel = fp8.Parallelism(
        mesh,
        sequence_parallel=case.sequence_parallel,
        gradient_dtype=case.gradient_dtype or None,
        schedule=case.schedule or None,
        chunks=case.chunks or None,
    )
    step = fp8.make_train_step(
        fp8.next_token_loss(model),
        tx,
        recipe,
        case.num_microbatches,
        cache_weights=case.cache_weights,
        warm_start=not case.cold,
        parallel=parallel,
        compiler_options=None if case.graphs == "default" and not case.options else case.compiler_options,
    )
    init = model.init, jax.random.key(1), tokens
    return step, partial(step.init_state, *init), step.state_shapes(*init)


def cases_for(devices: int) -> tuple[list[str], list[dict]]:
    """The meshes of this number of devices, and the recipes, that `--all` compares: the settings of the fastest
    variant, and bfloat16 in jax_fp8 and in plain Flax.
    """
    meshes = [f"{axis}={devices}" for axis in (DATA, FSDP, TENSOR, PIPE)]
    meshes.insert(-1, f"tensor={devices}{SEQUENCE}")
    fastest = {"recipe": "delayed", "fast": True, "fp8_head": True, "param_dtype": "bfloat16"}
    return meshes, [fastest, {"recipe": "bf16"}, {"recipe": "plain"}]
