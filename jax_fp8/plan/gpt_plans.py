"""Plans of GPTs for `python -m jax_fp8 plan`: for one mesh, or for the best among all meshes of a number of GPUs.

Choices ─setting_of→ arithmetic: which meshes fit, which changes help
        ─plan_of→ the compiled step: a Plan
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_fp8.core.checks import check_integer
from jax_fp8.kernels import extension
from jax_fp8.kernels.activation_functions import is_gated
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.loss import next_token_loss
from jax_fp8.models.remat import Remat
from jax_fp8.parallel.mesh import DATA, EXPERT, FSDP, PIPE, TENSOR, Parallelism, describe_mesh
from jax_fp8.plan.arithmetic import host_bytes_of, host_seconds_of, memory_of, operations_of
from jax_fp8.plan.choices import Choices, init_of, model_of, optimizer_of
from jax_fp8.plan.described import GPUS, load_cudnn
from jax_fp8.plan.experts import filled_rows, idle_params
from jax_fp8.plan.rates import Rates, RateTable, rates_of
from jax_fp8.plan.setting import Setting
from jax_fp8.plan.shape import Shape
from jax_fp8.plan.step_plan import GIB, USABLE, HostCopies, Plan, mesh_of_described, options_of_plan, plan_step
from jax_fp8.plan.suggest import left_out, meshes_of, rank, remedies
from jax_fp8.train.train_step import make_train_step

MOST_MICROBATCHES = 256  # that --suggest tries
NAMES = 72  # columns of a mesh's description in the table


def plan_preset(suggest: bool = False, devices: int | None = None, tries: int = 4, **flags) -> int:
    """Compile a GPT's training step for described GPUs, and print its memory and estimated time.

    Args:
      suggest: whether to try the meshes of this number of `devices`, and to compile for the best `tries` of them.
      flags: the fields of `Choices`.

    Returns:
      The exit status: 0 if the step fits, or one of the suggested ones.
    """
    choices = Choices(**flags)
    choices.check()
    rates = rates_for(choices)
    if suggest:
        return suggest_meshes(choices, devices, tries, rates)
    if devices is not None:
        raise ValueError(f"--devices is for --suggest, got {devices} without it; give --mesh, or add --suggest")
    get_ready()
    plan = plan_of(choices, rates)
    print(plan)
    if not plan.fits and not choices.config.num_experts:
        print("\n".join(_advice(setting_of(choices), plan.peak, plan.usable)))
    return 0 if plan.fits else 1


def suggest_meshes(choices: Choices, devices: int | None, tries: int, rates: Rates) -> int:
    """Compile for the most promising meshes of this number of GPUs, and print them, the fastest first."""
    if devices is None or choices.batch is None:
        raise ValueError("--suggest needs a number of GPUs and a batch for all of them; add --devices 64 --batch 512")
    if choices.config.num_experts:
        raise ValueError(f"--suggest plans models without experts, got --preset {choices.preset}; give --mesh")
    if choices.lora:
        raise ValueError(f"--suggest plans whole models, got --lora {choices.lora}; leave it out, and give --mesh")
    if choices.mesh != Choices.mesh or choices.sequence_parallel or choices.schedule or choices.chunks:
        raise ValueError(
            "--suggest tries all meshes and schedules itself, got one of --mesh, --sequence-parallel, --schedule and "
            "--chunks; leave them out"
        )
    check_integer("devices", devices)
    check_integer("tries", tries)
    get_ready()
    counts = [n for n in range(1, MOST_MICROBATCHES + 1) if choices.batch % n == 0]
    tried = counts if choices.microbatches is None else [choices.microbatches]
    settings, impossible = meshes_of(setting_of(choices), devices, tried)
    usable = USABLE * GPUS[choices.gpu]
    ranking = rank(settings, usable, rates, tries)
    plans = [(setting, plan_of(_as_in(setting, choices), rates)) for setting in ranking.best]
    fitting = [plan for _, plan in plans if plan.fits]
    print("\n".join(["", *_table(plans), "", *left_out(ranking, impossible, rates)]))
    if not fitting and settings:
        smallest = min(settings, key=lambda setting: memory_of(setting).together)
        needed = memory_of(smallest).together
        print(f"None fits into {usable / GIB:.1f} GiB. {smallest} needs the least, about {needed / GIB:.0f} GiB.")
        print("\n".join(_advice(smallest, needed, usable)))
    return 0 if fitting else 1


def _as_in(setting: Setting, choices: Choices) -> Choices:
    """The choices with mesh, schedule and microbatches of this setting."""
    schedule, chunks = (setting.schedule, setting.chunks) if setting.pipe > 1 else (None, None)
    return dataclasses.replace(
        choices,
        mesh=setting.mesh,
        sequence_parallel=setting.sequence_parallel,
        schedule=schedule,
        chunks=chunks,
        microbatches=setting.microbatches,
    )


def _advice(setting: Setting, peak: float, usable: float) -> list[str]:
    """Lines with the changes that would make this setting fit."""
    changes = remedies(setting, peak, usable)
    if not changes:
        return ["By arithmetic no change of these flags makes it fit."]
    return ["By arithmetic it would fit with", *(f"  {change}" for change in changes)]


def _table(plans: Sequence[tuple[Setting, Plan]]) -> list[str]:
    """Lines of a table: plans that fit come first, and the fastest first among them."""
    plans = sorted(plans, key=lambda pair: (not pair[1].fits, pair[1].seconds))
    rows = [f"{'mesh':<{NAMES}}{'GiB':>8}{'':>14}{'ms':>9}{'tokens/s':>12}{'a GPU':>9}"] if plans else []
    for setting, plan in plans:
        seconds, fits = plan.seconds, "fits" if plan.fits else "does not fit"
        speed = plan.tokens / seconds
        row = f"{plan.peak / GIB:>8.1f}{fits:>14}{1e3 * seconds:>9.1f}{speed:>12.0f}{speed / plan.devices:>9.0f}"
        rows.append(f"{setting!s:<{NAMES}}{row}")
    return rows


def rates_for(choices: Choices) -> Rates:
    """The rates of the chosen GPU or file, with the chosen rate between hosts."""
    rates = rates_of(choices.gpu) if choices.rates is None else RateTable.load(choices.rates).rates
    if choices.between_hosts is None:
        return rates
    return dataclasses.replace(rates, between_hosts=1e9 * choices.between_hosts)


def shape_of(config: GPTConfig) -> Shape:
    return Shape(
        layers=config.num_layers,
        width=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.kv_heads,
        mlp=config.mlp_hidden_size or 4 * config.hidden_size,
        vocab=config.vocab_size,
        is_gated=is_gated(config.activation),
        is_tied=config.tie_embeddings,
        head_dim=config.head_dim,
    )


def operations_of_a_token(config: GPTConfig, is_frozen: bool = False) -> float:
    """Model FLOPs of training on one token of a whole sequence: forward and backward of every product.

    `is_frozen`: the weights have no gradients, because adapters are trained. Their own few products are not counted.
    """
    length, shape = config.max_seq_len, shape_of(config)
    weight_gradients = 2 * (shape.of_layers + shape.vocab * shape.width)
    whole = operations_of(Setting(shape=shape, batch=1, sequence=length)) / length
    return whole - weight_gradients if is_frozen else whole


def setting_of(choices: Choices) -> Setting:
    """The step of these choices, for plan/arithmetic.py."""
    config = choices.config
    remat = Remat.parse(choices.remat, config.num_layers)
    return Setting(
        shape=shape_of(config),
        batch=choices.sequences,
        sequence=config.max_seq_len,
        microbatches=choices.microbatches_of_step,
        pipe=choices.axes.get(PIPE, 1),
        data=choices.axes.get(DATA, 1),
        fsdp=choices.axes.get(FSDP, 1),
        tensor=choices.axes.get(TENSOR, 1),
        sequence_parallel=choices.sequence_parallel,
        schedule=choices.schedule or "1f1b",
        chunks=choices.chunks or (2 if choices.schedule == "interleaved" else 1),
        fp8=choices.recipe != "bf16",
        by_tile=choices.recipe == "block",
        fp8_attention=choices.fp8_attention,
        recompute=choices.recompute or remat.kind == "norms",
        full=remat.kind == "full",
        offloaded=remat.count,
        bf16_params=choices.bf16_params,
        bf16_moments=choices.bf16_moments,
        lora=choices.lora,
    )


def get_ready() -> None:
    """Prepare this process to compile for described GPUs, and raise if it cannot."""
    if reason := extension.missing_reason():
        raise ValueError(reason)
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache has no listing of its launches
    load_cudnn()


def plan_of(choices: Choices, rates: Rates) -> Plan:
    """Compile the step, and return its plan. Compiling takes a while, so this first prints what it compiles."""
    config, model, microbatches = choices.config, model_of(choices), choices.microbatches_of_step
    mesh = mesh_of_described(choices.axes, choices.gpu)
    parallel = Parallelism(mesh, (), choices.sequence_parallel, None, choices.schedule, choices.chunks)
    step = make_train_step(
        next_token_loss(model),
        optimizer_of(choices),
        model.recipe,
        microbatches,
        parallel=parallel,
        compiler_options=options_of_plan(offloads=choices.remat.startswith("offload")),
    )
    sequences, length = choices.sequences, config.max_seq_len
    tokens = jax.ShapeDtypeStruct((sequences, length), jnp.int32)
    # Shapes are traced for this machine, where attention by cuDNN may not be available.
    local = dataclasses.replace(model, attention_implementation=None)
    state = step.state_shapes(init_of(local, choices.axes.get(TENSOR, 1) > 1), jax.random.key(0), tokens)
    plain = jax.eval_shape(local.clone(lora=None).init, jax.random.key(0), tokens)["params"]
    num_params = sum(leaf.size for leaf in jax.tree.leaves(plain))
    used = num_params - (idle_params(config) if config.num_experts else 0)  # by each token
    flops = tokens.size * 6 * (used + config.num_layers * shape_of(config).query_width * length)
    if choices.lora:
        flops = tokens.size * operations_of_a_token(config, is_frozen=True)
    size = f"{sequences} x {length} tokens in {microbatches} microbatches, {parallel.mesh.size} {choices.gpu}"
    described = f"{describe_mesh(parallel.mesh)}{', sequence parallel' if choices.sequence_parallel else ''}"
    adapters = f" frozen, adapters of rank {choices.lora}" if choices.lora else ""
    print(
        f"{choices.preset}, {num_params / 1e9:.2f}B params{adapters}, {choices.recipe}, {size} ({described}); "
        "compiling",
        flush=True,
    )
    batch = jax.ShapeDtypeStruct((sequences, length + 1), jnp.int32)
    planned = step, parallel, state, batch, microbatches, choices.gpu, flops
    if config.num_experts:
        own_tokens = tokens.size // parallel.batch_parts // microbatches
        filled = filled_rows(config, own_tokens, choices.axes.get(EXPERT, 1))
        return plan_step(*planned, about=None, rates=rates, filled=filled)
    setting = setting_of(choices)
    host = HostCopies(host_bytes_of(setting), host_seconds_of(setting, rates))
    return plan_step(*planned, memory_of(setting), rates, host)
