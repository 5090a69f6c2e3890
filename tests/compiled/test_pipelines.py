"""The training step of a pipeline, of layers of GPT-3 1.3B, compiled for four H200s: what is copied while it runs, what
goes from stage to stage, and what is written in place.
"""

import functools
from collections import Counter
from dataclasses import dataclass

import h200
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import jax_fp8 as fp8
from jax_fp8.inspect.capture import SMALLEST_COPY
from jax_fp8.kernels import extension
from jax_fp8.parallel.schedules import make_schedule
from jax_fp8.train.cuda_graph import default_options

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SEQ, BATCH, MICROBATCHES = 2048, 16, 4
RECIPE = fp8.DelayedScaling()
GEMMS = 4  # of a layer: query, key and value as one, out, up, down
KERNELS = 6
SLOTS = 4  # of what a stage keeps of a microbatch
IN_PLACE = "xla_gpu_copy_insertion_use_region_analysis"


@dataclass(frozen=True)
class Mode:
    """A step, and what is to be seen of it.

    Args:
      axes: of the mesh.
      layers: a stage has one.
      counts: collectives of a step outside of branches by kind and dtype, but for activations.
      in_branches: how often collectives stand in branches, whichever is taken.
      graphs: CUDA graphs, at most.
      cuts: conditionals that no graph holds: those with collectives.
    """

    axes: dict[str, int]
    schedule: str
    layers: int
    counts: dict[tuple[str, str], int]
    in_branches: dict[tuple[str, str], int]
    graphs: int
    cuts: int

    @property
    def ticks(self) -> int:
        return len(make_schedule(self.schedule, self.axes["pipe"], MICROBATCHES).table)


TO_STAGES_AND_BACK = {
    ("all-to-all", "f8e4m3fn"): GEMMS,
    ("all-to-all", "f32"): KERNELS,  # their gradients
    ("all-gather", "f32"): 2,  # embedding and positions
    ("reduce-scatter", "f32"): 2,  # their gradients
    ("all-gather", "bf16"): 1,  # what enters the first layer
    ("reduce-scatter", "bf16"): 1,  # its gradient
    ("all-reduce", "u32"): 2,  # amaxes: of the casts of weights, and of all tensors
}
OF_LOSS = {("reduce-scatter", "bf16"): 1, ("all-gather", "bf16"): 1}  # what leaves the last layer, and its gradient
MODES = {
    "pipe 4, 1f1b": Mode(
        {"pipe": 4},
        "1f1b",
        4,
        TO_STAGES_AND_BACK | {("all-reduce", "f32"): 1},  # gradients of vectors, the loss
        OF_LOSS,
        40,
        cuts=1,
    ),
    "pipe 2, tensor 2, zero-bubble": Mode(
        {"pipe": 2, "tensor": 2},
        "zero-bubble",
        2,
        TO_STAGES_AND_BACK
        | {
            ("all-reduce", "f32"): 3,  # gradients of vectors, and of those and of positions that all of `tensor` have
            ("all-reduce", "bf16"): 2,  # rows of the embedding, and the gradient of them
        },
        # Each half of a layer, in the forward and in the input gradient: once for each slot. Then the loss.
        OF_LOSS | {("all-reduce", "bf16"): 2 * SLOTS + 2 * SLOTS + 2, ("all-reduce", "f32"): 4},
        90,
        cuts=2,
    ),
}
ZERO_BUBBLE = "pipe 2, tensor 2, zero-bubble"


@pytest.fixture(autouse=True)
def _cudnn(monkeypatch, traced_anew):
    """A version of cuDNN for whoever asks, as on a machine that has it."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)


def compile_step(name: str, **changed) -> h200.Program:
    mode = MODES[name]
    mesh = h200.mesh(AxisType.Explicit, **mode.axes)
    model = fp8.GPT(fp8.GPTConfig.preset("gpt3-1.3b", num_layers=mode.layers), recipe=RECIPE)
    parallel = fp8.Parallelism(mesh, schedule=mode.schedule)
    step = fp8.make_train_step(
        fp8.next_token_loss(model), fp8.fused_adamw(1e-3), RECIPE, MICROBATCHES, parallel=parallel,
        compiler_options=default_options(on_mesh=True) | changed,
    )  # fmt: skip
    state = step.state_shapes(model.init, jax.random.key(0), jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32))
    batch = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32, sharding=h200.on_mesh(mesh))
    with pytest.MonkeyPatch.context() as patch:  # to make params, without cuDNN, no attention is needed
        h200.use_cudnn(patch)
        return h200.compile(step, state, batch)


compiled = functools.cache(compile_step)
on_each = pytest.mark.parametrize("name", MODES, scope="module")


def activations(program: h200.Program) -> int:
    """How often something goes from a stage to the next one or the one before, in a step."""
    return sum(of.times for of in program.report.collectives if of.kind == "collective-permute")


@on_each
def test_nothing_is_copied(name):
    """Arrays of the slots go through loop and branches where they are; of the whole step the largest copy is small."""
    report = compiled(name).report
    assert (report.weight_copies, report.all_copies_bytes) == ((), 0)
    assert all(copy.results[0].bytes <= SMALLEST_COPY for copy in compiled(name).copies)


def test_copies_of_slots_are_seen():
    """Negative control: without looking at regions, XLA copies what goes through the branches."""
    report = compile_step(ZERO_BUBBLE, **{IN_PLACE: False}).report
    assert report.all_copies_bytes > 10 * 2**30


@on_each
def test_each_weight_is_cast_once(name):
    """Where it lies, so each device casts its part of all layers. No branch casts any."""
    report = compiled(name).report
    assert report.weight_casts == GEMMS * MODES[name].layers
    assert all(branch.weight_casts == 0 for branches in report.conditionals for branch in branches)


@on_each
def test_collectives(name):
    program, mode = compiled(name), MODES[name]
    found: dict[bool, Counter] = {False: Counter(), True: Counter()}
    for of in program.report.collectives:
        for dtype in of.dtypes:
            found[of.in_branch][of.kind, dtype] += of.times
    assert found[False].pop(("collective-permute", "bf16")) == activations(program) == 2 * mode.ticks
    assert found[False] == mode.counts
    # The report counts those of a branch as often as its conditional runs, which is in every tick.
    assert found[True] == {kind: mode.ticks * times for kind, times in mode.in_branches.items()}


@on_each
def test_the_state_is_written_in_place(name):
    report = compiled(name).report
    assert report.argument_bytes - report.aliased_bytes == BATCH * (SEQ + 1) * 4  # the batch is left


@on_each
def test_cuda_graphs(name):
    """Without `tensor`, one graph has all units of a stage: the conditional and its branches."""
    report = compiled(name).report
    assert report.graphs <= MODES[name].graphs
    assert (report.cuts["While"], report.cuts["Conditional"]) == (MODES[name].cuts, MODES[name].cuts)


@on_each
def test_products_of_each_unit(name):
    """A forward has one for each kernel, an input gradient one for each GEMM, a weight gradient one for each kernel;
    and each unit has a branch for each slot.
    """
    found = Counter(branch.gemms for branch in compiled(name).report.conditionals[0])
    backward = [GEMMS + KERNELS] if MODES[name].schedule == "1f1b" else [GEMMS, KERNELS]
    assert found == Counter([0, *SLOTS * [KERNELS, *backward]])
