"""A training step compiled for H200s, with no GPU: it is what it claims to be before a device has seen it.

The step of a small GPT goes through the whole GPU compiler (`h200.py`). What is asserted is what a profile on a device
would be searched for: the FP8 GEMMs, no bfloat16 GEMM where FP8 was asked for, one CUDA graph, no copies of donated
state, no gathering of sharded arrays. Every check is also made on a program that must fail it.

Attention is XLA's own here: cuDNN, which a GPU would use, cannot be asked without its library.
"""

import re
from functools import partial

import h200
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType

import jax_fp8 as fp8
from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import KERNEL
from jax_fp8.inspect.capture import CaptureReport
from jax_fp8.kernels import extension
from jax_fp8.kernels.amax import amax
from jax_fp8.kernels.gemm import WORKSPACE_BYTES
from jax_fp8.kernels.quantize import quantize_transpose
from jax_fp8.ops.head import PLAIN_HEAD_SCOPE
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS
from jax_fp8.train.lowering import Lowering

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
in_place = pytest.mark.skipif(h200.COPIES_IN_BRANCHES, reason="the compiler of jaxlib 0.10 copies in branches")

CONFIG = fp8.GPTConfig(vocab_size=512, num_layers=1, num_heads=4, hidden_size=256, max_seq_len=128)
BATCH = (16, 129)
WEIGHTS = 4 * CONFIG.num_layers  # of qkv, attention output, MLP up, MLP down
TENSORS = 3 * WEIGHTS  # input, weight and output gradient of each
FPROPS = 6 * CONFIG.num_layers  # queries, keys and values are three products,
GEMMS = FPROPS + 2 * WEIGHTS  # with dgrad and wgrad: kernels as small as these share one
ALONE = WEIGHTS - CONFIG.num_layers  # weights that are no part of one
METRICS_BYTES = 12  # written over zeros that are donated too
SMALLEST_KERNEL = CONFIG.hidden_size**2  # bytes, in FP8
RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=16),
    "current": fp8.CurrentScaling(),
    "block": fp8.BlockScaling(),
}


def abstract_state(recipe, tx, cached) -> fp8.TrainState:
    def create(tokens):
        model = fp8.GPT(CONFIG, recipe=recipe)
        variables = dict(model.init(jax.random.key(0), tokens[:, :-1]))
        if cached:
            forward = lambda variables: model.apply(variables, tokens[:, :-1])  # noqa: E731
            variables["fp8_cache"] = fp8.cast_weights(variables, recipe, forward=forward)
        return fp8.TrainState.create(variables=variables, tx=tx)

    return jax.eval_shape(create, jax.ShapeDtypeStruct(BATCH, jnp.int32))


def train_step(
    recipe_name: str, microbatches: int = 1, data: int = 1, cached: bool = False
) -> tuple[h200.Program, int]:
    """The compiled step and the bytes of its state, which every device holds; the batch is split over "data"."""
    recipe = RECIPES[recipe_name]
    tx = optax.chain(optax.clip_by_global_norm(1.0), fp8.fused_adamw(1e-3, weight_decay=0.1))
    loss_fn = fp8.next_token_loss(fp8.GPT(CONFIG, recipe=recipe))
    step = fp8.make_train_step(loss_fn, tx, recipe, microbatches, compiler_options=CUDA_GRAPH_OPTIONS)
    mesh = h200.mesh(data=data)
    state = abstract_state(recipe, tx, cached)
    tokens = jax.ShapeDtypeStruct(BATCH, jnp.int32, sharding=h200.on_mesh(mesh, "data"))
    program = h200.compile(step, h200.shapes(state, h200.on_mesh(mesh)), tokens)
    return program, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def report_of(microbatches: int, piece: str = "step", remat: bool = False) -> CaptureReport:
    """What a step, or one piece of it, becomes on one H200."""
    recipe, tx, on = RECIPES["delayed"], fp8.fused_adamw(1e-3), h200.on_one_device()
    loss_fn = fp8.next_token_loss(fp8.GPT(CONFIG, recipe=recipe))
    loss_fn = jax.checkpoint(loss_fn) if remat else loss_fn
    step = fp8.make_train_step(loss_fn, tx, recipe, microbatches, compiler_options=CUDA_GRAPH_OPTIONS)
    state = h200.shapes(abstract_state(recipe, tx, cached=False), on)
    tokens = h200.shapes(jax.ShapeDtypeStruct(BATCH, jnp.int32), on)
    if piece == "step":
        lowered = step.lower(state, tokens)
    else:
        pending = h200.shapes(jax.eval_shape(step.start, state), on)
        flag = h200.shapes(jax.ShapeDtypeStruct((), jnp.bool_), on)
        lowered = Lowering(
            step._apply.lower(state, pending)
            if piece == "apply"
            else step._accumulate.lower(state, pending, tokens, flag)
        )
    return fp8.capture_report(lowered.compile(h200.UNTIMED))


def unquantized_gemms(program: h200.Program) -> list[h200.Instruction]:
    """GEMMs of weights that are not in FP8. Those of attention are batched, and the head is meant to be in bfloat16."""
    wide = program.gemms_of("bf16", "f16", "f32")
    return [gemm for gemm in wide if len(gemm.operands[0].shape) == 2 and PLAIN_HEAD_SCOPE not in gemm.op_name]


def big_copies(program: h200.Program) -> list[str]:
    return [str(copy) for copy in program.copies if copy.results[0].bytes >= SMALLEST_KERNEL]


def scales_made_apart(program: h200.Program) -> list[str]:
    """Kernels and copies of a layer that make one float32 of a few: a scale sliced out of three,
    or computed from an amax."""
    return [
        str(made)
        for made in program.instructions
        if made.opcode in ("fusion", "copy")
        and "layer_" in made.op_name
        and made.results[0].dtype == "f32"
        and made.results[0].bytes == 4
        and all(operand.dtype == "f32" and operand.bytes <= 12 for operand in made.operands)
    ]


def matrix(sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((2048, 1024), jnp.bfloat16, sharding=sharding)


def rows(mesh) -> jax.ShapeDtypeStruct:
    return matrix(h200.on_mesh(mesh, "data"))


def checked(program: h200.Program) -> dict:
    """What every compiled step must be, in one dict, so that a failing test shows all that is wrong."""
    return {
        "gemm": program.custom_calls["jax_fp8_gemm"],
        "casts": sum(count for name, count in program.custom_calls.items() if "quantize" in name),
        "amaxes": sum(count for name, count in program.custom_calls.items() if name.endswith("amax")),
        "norm_backward": program.custom_calls["jax_fp8_norm_backward"],
        "adam": program.custom_calls["jax_fp8_adam"],
        "update_state": program.custom_calls["jax_fp8_update_state"],
        "histories made apart": list(map(str, program.making("f32", 3, 16))),
        "gemms not in FP8": list(map(str, unquantized_gemms(program))),
        "scales made apart": scales_made_apart(program),
        "state in place": program.aliased_bytes,
        "copies": list(map(str, big_copies(program))),
        "all-gathers": list(map(str, program.all_gathers)),
    }


def promised(recipe_name: str, state_bytes: int) -> dict:
    return {
        "gemm": GEMMS,
        "casts": TENSORS,  # each once; a cached weight only where it is stale
        "amaxes": TENSORS if recipe_name == "current" else 0,
        "norm_backward": 2 * CONFIG.num_layers,
        "adam": 1,
        "update_state": 1 if recipe_name == "delayed" else 0,
        "histories made apart": [],
        "gemms not in FP8": [],
        "scales made apart": [],
        "state in place": state_bytes + METRICS_BYTES,
        "copies": [],
        "all-gathers": [],
    }


def check_casts_of_weights(report: CaptureReport, cached: bool):
    """Each once; and where they are cached none, unless it is not the cache of these params: one conditional,
    for which nothing is copied."""
    assert (report.cuts, report.unknown_trips, report.weight_copies) == ({}, 0, ())
    if cached:
        [(keep, cast)] = report.conditionals
        assert (report.weight_casts, keep.kernels, cast.weight_casts) == (0, 0, WEIGHTS)
    else:
        assert (report.weight_casts, report.conditionals) == (WEIGHTS, ())


def check_loop_over_microbatches(program: h200.Program):
    """The weights are cast before it, and the GEMMs in it add the gradients up in place."""
    entry = program.hlo[program.hlo.index("\nENTRY ") :]
    casts = [len(re.findall(r'custom_call_target="jax_fp8_\w*quantize', text)) for text in (entry, program.hlo)]
    assert casts == [WEIGHTS, TENSORS]
    gemms = [gemm for gemm in program.gemms if gemm.target == "jax_fp8_gemm"]
    adding = [gemm for gemm in gemms if gemm.operands[-1].dtype == gemm.results[0].dtype == "f32"]
    assert sum(len(gemm.operands) == 5 for gemm in adding) == ALONE


@pytest.mark.parametrize(
    ("recipe_name", "microbatches", "cached"),
    [
        pytest.param("delayed", 1, False, marks=pytest.mark.slow),  # as with current scaling, and as with 2
        ("current", 1, False),
        ("block", 1, False),
        pytest.param("block", 2, False, marks=pytest.mark.slow),  # as with 1, and as with delayed scaling
        pytest.param("delayed", 2, False, marks=pytest.mark.slow),  # as with a cache
        pytest.param("current", 2, False, marks=pytest.mark.slow),  # as with 1, and as with delayed scaling
        pytest.param("delayed", 1, True, marks=in_place),
        pytest.param("delayed", 2, True, marks=in_place),
        pytest.param("block", 1, True, marks=in_place),
        pytest.param("block", 2, True, marks=[in_place, pytest.mark.slow]),  # as with 1, and as with delayed scaling
    ],
)
def test_step_on_one_device(recipe_name, microbatches, cached):
    program, state_bytes = train_step(recipe_name, microbatches, cached=cached)
    assert checked(program) == promised(recipe_name, state_bytes)
    # The loop over microbatches included, with the options that make_train_step sets on a GPU.
    assert (program.graphs, dict(program.outside_graphs)) == (1, {})
    # Every GEMM asks for a workspace of its own; XLA gives them the same memory.
    assert program.temp_bytes < 4 * WORKSPACE_BYTES
    assert program.report.gemms == microbatches * GEMMS
    check_casts_of_weights(program.report, cached)
    if microbatches > 1 and not cached:
        check_loop_over_microbatches(program)


@pytest.mark.parametrize(("microbatches", "remat"), [(1, True), (8, True)])
def test_every_weight_is_cast_once_a_step(microbatches, remat):
    report = report_of(microbatches, remat=remat)
    assert (report.graphs, report.cuts, report.unknown_trips) == (1, {}, 0)
    # A single microbatch has nobody to share a cast with: its recomputed forward casts again.
    assert report.weight_casts == WEIGHTS * (2 if remat and microbatches == 1 else 1)
    assert report.gemms == microbatches * (GEMMS + (FPROPS if remat else 0))
    assert report.weight_copies == ()


@in_place
def test_a_microbatch_of_the_caller():
    """One graph; one conditional that casts the weights and clears the sums, or does nothing."""
    report = report_of(4, piece="accumulate")
    assert (report.graphs, report.cuts, report.weight_casts, report.gemms) == (1, {}, 0, GEMMS)
    [(keep, first)] = report.conditionals
    assert (keep.kernels, first.weight_casts) == (0, WEIGHTS)
    assert report.weight_copies == ()
    report = report_of(4, piece="apply")
    assert (report.graphs, report.cuts, report.weight_copies, report.all_copies_bytes) == (1, {}, (), 0)


@pytest.mark.parametrize("recipe_name", ["delayed", "block"])
def test_step_on_four_devices_data_parallel(recipe_name):
    program, state_bytes = train_step(recipe_name, data=4)
    assert checked(program) == promised(recipe_name, state_bytes)
    every_row = BATCH[0] * CONFIG.max_seq_len
    assert all(every_row not in operand.shape for gemm in program.gemms for operand in gemm.operands)
    # One reduction for all amaxes, one for all float32 gradients, one for the bfloat16 gradient of the tied head.
    assert {reduction.opcode.removesuffix("-start") for reduction in program.collectives} == {"all-reduce"}
    assert len(program.collectives) <= 3, list(map(str, program.collectives))
    # They stay outside the graphs and cut the step around them; what runs during a reduction is a graph of its own.
    assert set(program.outside_graphs) <= {"AllReduce", "AsyncStart", "AsyncDone"}
    assert program.graphs <= 1 + 2 * len(program.collectives)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_operations_follow_shardings(axis_type):
    mesh = h200.mesh(axis_type, data=4)

    def product(x, w):
        x, w = (quantize_transpose(matrix, Cast.with_scale(fp8.E4M3, jnp.float32(1))) for matrix in (x, w))
        return fp8.matmul(x.rowwise, w.rowwise), jnp.stack([x.amax, w.amax])

    with jax.set_mesh(mesh):
        program = h200.compile(jax.jit(product), rows(mesh), matrix(h200.on_mesh(mesh)))
    assert program.custom_calls["jax_fp8_gemm"] == 1 and not program.all_gathers
    assert [reduction.results[0].shape for reduction in program.collectives] == [()]  # the amax of x


# What each check must catch.


def test_bfloat16_gemms_are_found():
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w.T).astype(jnp.float32))

    program = h200.compile(jax.jit(jax.grad(loss)), matrix(h200.on_one_device()), matrix(h200.on_one_device()))
    assert len(unquantized_gemms(program)) == 2


@pytest.mark.parametrize("recipe_name", ["delayed", "current"])
def test_scales_made_apart_are_found(recipe_name):
    """Both ways to a scale, as plain operations before the cast and as the kernel's own work."""
    recipe, from_amax = RECIPES[recipe_name], recipe_name == "current"

    def cast(apart, x, scales):
        with jax.named_scope("layer_0"):
            cast = recipe.cast(KERNEL, None if from_amax else scales, partial(amax, x))
            if apart:
                scale = cast.rule.scale(cast.source if from_amax else cast.source[KERNEL])
                cast = Cast.with_scale(fp8.E4M3, scale)
            return quantize_transpose(x, cast)

    on = h200.on_one_device()
    arguments = matrix(on), jax.ShapeDtypeStruct((3,), jnp.float32, sharding=on)
    apart, within = (h200.compile(jax.jit(partial(cast, apart)), *arguments) for apart in (True, False))
    assert len(scales_made_apart(apart)) == 1
    assert scales_made_apart(within) == []
    assert within.custom_calls.total() == apart.custom_calls.total() == 1 + from_amax


def test_gathering_is_found():
    """A custom call that does not say how it is partitioned is what the library must never emit."""
    call = jax.jit(lambda x: jax.ffi.ffi_call("jax_fp8_amax", jax.ShapeDtypeStruct((), jnp.float32))(x))
    assert len(h200.compile(call, rows(h200.mesh(data=4))).all_gathers) == 1
    assert not h200.compile(jax.jit(amax), rows(h200.mesh(data=4))).all_gathers


@pytest.mark.parametrize("donate", [True, False])
def test_copies_are_found(donate):
    update = jax.jit(lambda w: w.at[3].set(0), donate_argnums=(0,) if donate else ())
    program = h200.compile(update, matrix(h200.on_one_device()))
    assert (len(big_copies(program)), program.aliased_bytes) == ((0, 2048 * 1024 * 2) if donate else (1, 0))


def test_work_outside_graphs_is_found():
    def loop(x):
        return jax.lax.scan(lambda carry, _: (jnp.sin(carry) @ carry.T @ carry, None), x, length=3)[0]

    whole = h200.compile(jax.jit(loop, compiler_options=CUDA_GRAPH_OPTIONS), matrix(h200.on_one_device()))
    assert (whole.graphs, dict(whole.outside_graphs)) == (1, {})
    by_host = h200.compile(jax.jit(loop), matrix(h200.on_one_device()))
    assert by_host.outside_graphs["While"] == 1
    without = h200.compile(jax.jit(loop), matrix(h200.on_one_device()), xla_gpu_enable_command_buffer="")
    assert without.graphs == 0 and without.outside_graphs["CublasLtMatmul"] == 2
