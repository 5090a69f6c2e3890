"""The training step of two layers of GPT-3 1.3B on a mesh, compiled for four H200s: which collectives it has, in which
dtype, how many bytes they send, and what is computed in the meantime.
"""

import functools
import math
from collections import Counter
from dataclasses import dataclass

import h200
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import jax_fp8 as fp8
from jax_fp8.core.recipe import Recipe
from jax_fp8.inspect.collectives import Collective
from jax_fp8.kernels import extension
from jax_fp8.ops.collectives import reduce_rows
from jax_fp8.train.cuda_graph import default_options

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SEQ, WIDTH, HIDDEN, VOCAB, LAYERS = 2048, 2048, 8192, 50304, 2
CHUNK = 4096  # tokens of the loss at a time
SUMS = ("all-reduce", "reduce-scatter")
LEFT_OUT = 3 * LAYERS  # by controls: sums of what leaves each half of a layer, and of the gradient of what enters one

DELAYED = fp8.DelayedScaling()  # its amaxes are one all-reduce a step, of u32


@dataclass(frozen=True)
class Mode:
    """A step, and what is to be seen of it.

    Args:
      axes: of the mesh.
      batch: sequences.
      counts: collectives by kind and dtype, as the compiler has combined them; one of two dtypes counts twice.
      mib: that a device sends in a step, at most.
      wide: arrays of 16 bits or more that are gathered.
    """

    axes: dict[str, int]
    batch: int
    counts: dict[tuple[str, str], int]
    mib: float
    wide: dict[str, int]
    sequence: bool = False
    recipe: Recipe = DELAYED

    def size(self, *names: str) -> int:
        return math.prod(self.axes.get(name, 1) for name in names)

    @property
    def rows(self) -> int:
        """Tokens that a device multiplies with its part of a layer."""
        return self.batch * SEQ // self.size("data", "fsdp")


EMBEDDING, POSITIONS = f"f32[{VOCAB},{WIDTH}]", f"f32[{SEQ},{WIDTH}]"
TENSOR_4_SEQUENCE = {
    ("reduce-scatter", "bf16"): 13,  # out of the embedding, each half of a layer and 4 chunks; gradients of halves
    ("all-gather", "f8e4m3fn"): 4,  # into each half of a layer
    ("all-gather", "f8e5m2"): 4,  # gradients, into each half of a layer
    ("all-gather", "bf16"): 5,  # 4 chunks into the head, and the gradient of the embedding
    ("all-reduce", "f32"): 9,  # two for each chunk of the loss; gradients of params that all devices hold
}
WIDE_OF_TENSOR_4 = {f"bf16[{CHUNK},{WIDTH}]": 4, f"bf16[{8 * SEQ},{WIDTH}]": 1}

MODES = {
    "data 4": Mode({"data": 4}, 32, {("all-reduce", "f32"): 15, ("all-reduce", "u32"): 1}, 1200, {}),
    "fsdp 4": Mode(
        {"fsdp": 4},
        32,
        {
            ("all-gather", "f8e4m3fn"): 5,
            ("all-gather", "f32"): 2,
            ("reduce-scatter", "f32"): 6,
            ("all-reduce", "f32"): 2,
            ("all-reduce", "u32"): 1,
        },
        980,
        {EMBEDDING: 1, POSITIONS: 1},
    ),
    "tensor 4": Mode(
        {"tensor": 4},
        8,
        {("all-reduce", "bf16"): 13, ("all-reduce", "f32"): 9, ("all-reduce", "u32"): 1},
        1060,
        {},
    ),
    "tensor 4, sequence": Mode(
        {"tensor": 4},
        8,
        TENSOR_4_SEQUENCE | {("all-reduce", "u32"): 1},
        850,
        WIDE_OF_TENSOR_4,
        sequence=True,
    ),
    "tensor 4, sequence, current scaling": Mode(
        {"tensor": 4},
        8,
        TENSOR_4_SEQUENCE | {("all-reduce", "u32"): 16},  # of 8 GEMMs: kernel and input, and gradient
        850,
        WIDE_OF_TENSOR_4,
        sequence=True,
        recipe=fp8.CurrentScaling(),
    ),
    "fsdp 2, tensor 2, sequence": Mode(
        {"fsdp": 2, "tensor": 2},
        8,
        {
            ("all-gather", "f8e4m3fn"): 7,  # kernels in 3, over fsdp, and into each half of a layer
            ("all-gather", "f32"): 2,
            ("all-gather", "f8e5m2"): 4,
            ("all-gather", "bf16"): 3,
            ("reduce-scatter", "bf16"): 11,
            ("reduce-scatter", "f32"): 6,
            ("all-reduce", "f32"): 8,
            ("all-reduce", "u32"): 1,
        },
        610,
        {f"f32[{VOCAB // 2},{WIDTH}]": 1, POSITIONS: 1, f"bf16[{CHUNK},{WIDTH}]": 2, f"bf16[{4 * SEQ},{WIDTH}]": 1},
        sequence=True,
    ),
}
SLOW = ("tensor 4, sequence, current scaling", "fsdp 2, tensor 2, sequence")
SPLIT = [name for name, mode in MODES.items() if "tensor" in mode.axes]


def on_each(*names: str):
    """A test on each of these, together with other tests on the same: each is compiled once."""
    params = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]
    return pytest.mark.parametrize("name", params, scope="module")


@pytest.fixture(autouse=True)
def _cudnn(monkeypatch, traced_anew):
    """A version of cuDNN for whoever asks, as on a machine that has it."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)


def make_step(name: str, **options):
    """The step, and the shapes of its state."""
    mode = MODES[name]
    model = fp8.GPT(fp8.GPTConfig.preset("gpt3-1.3b", num_layers=LAYERS), recipe=mode.recipe)
    parallel = fp8.Parallelism(h200.mesh(AxisType.Explicit, **mode.axes), sequence_parallel=mode.sequence)
    step = fp8.make_train_step(
        fp8.next_token_loss(model), fp8.fused_adamw(1e-3), mode.recipe, parallel=parallel,
        compiler_options=default_options(on_mesh=True), **options,
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((mode.batch, SEQ), jnp.int32)
    return step, step.state_shapes(model.init, jax.random.key(0), tokens)


def compile_step(name: str, **options) -> h200.Program:
    step, state = make_step(name, **options)
    mesh = h200.mesh(AxisType.Explicit, **MODES[name].axes)
    rows = h200.on_mesh(mesh, tuple(axis for axis in mesh.axis_names if axis != "tensor"))
    batch = jax.ShapeDtypeStruct((MODES[name].batch, SEQ + 1), jnp.int32, sharding=rows)
    with pytest.MonkeyPatch.context() as patch:  # to make params, without cuDNN, no attention is needed
        h200.use_cudnn(patch)
        return h200.compile(step, state, batch)


compiled = functools.cache(compile_step)


def gathered_in_fp8(mode: Mode) -> dict[str, int]:
    """What is gathered in FP8: over `fsdp` the kernels, in each layer queries, keys and values as one; over `tensor`
    the rows that enter a half of a layer, forward and backward.
    """
    found: Counter[str] = Counter()
    if mode.size("fsdp") > 1:
        split = mode.size("tensor")
        by_columns, by_rows = ((WIDTH, 3 * WIDTH), (WIDTH, HIDDEN)), ((WIDTH, WIDTH), (HIDDEN, WIDTH))
        shapes = [(k, n // split) for k, n in by_columns] + [(k // split, n) for k, n in by_rows]
        found.update({f"f8e4m3fn[{k},{n}]": LAYERS for k, n in shapes})
    if mode.sequence:
        found.update({f"{dtype}[{mode.rows},{WIDTH}]": 2 * LAYERS for dtype in ("f8e4m3fn", "f8e5m2")})
    return dict(found)


def summed_elements(name: str) -> int:
    """How many numbers a device gives to sums in float32: gradients of params, the loss and the number of its labels,
    and three numbers a token of the softmax.
    """
    mode, (_, state) = MODES[name], make_step(name)
    of_loss = 2 * (mode.size("data", "fsdp") > 1) + 3 * mode.rows * (mode.size("tensor") > 1)
    return of_loss + sum(of_gradient(mode, param) for param in jax.tree.leaves(state.params))


def of_gradient(mode: Mode, param: jax.ShapeDtypeStruct) -> int:
    """As `summed_elements`, of one param: over the axes of the batch, and over `tensor` if that does not split it."""
    spec, tensor = jax.tree.leaves(tuple(param.sharding.spec)), mode.size("tensor")
    elements = math.prod(param.shape) // (tensor if "tensor" in spec else 1)
    whole = tensor > 1 and "tensor" not in spec
    if "fsdp" in spec:  # then of its shard over `tensor`
        return elements + (elements // mode.size("fsdp") if whole else 0)
    return elements if whole or mode.size("data", "fsdp") > 1 else 0


def gathers(program: h200.Program, *dtypes: str) -> dict[str, int]:
    """What is gathered in these dtypes, and how often in a step."""
    found: Counter[str] = Counter()
    for of in program.report.collectives:
        for array in of.arrays:
            if of.kind == "all-gather" and array.dtype in dtypes:
                found[str(array)] += of.times
    return dict(found)


def float32_elements(program: h200.Program) -> int:
    """How many numbers a device gives to sums in float32, in a step."""
    sums = [of for of in program.report.collectives if of.kind in SUMS]
    return sum(of.times * math.prod(array.shape) for of in sums for array in of.arrays if array.dtype == "f32")


def sums_of_rows(program: h200.Program, name: str) -> list[Collective]:
    """The sums of all of a device's rows over `tensor`, in the order of their launch."""
    alone = [of for of in program.report.collectives if of.kind in SUMS and len(of.arrays) == 1]
    return [of for of in alone if str(of.arrays[0]) == f"bf16[{MODES[name].rows},{WIDTH}]"]


@on_each(*MODES)
def test_collectives_and_their_bytes(name):
    counts, wire_bytes = h200.over_the_wire(compiled(name))
    assert counts == MODES[name].counts
    assert 0.9 * MODES[name].mib < wire_bytes / 2**20 <= MODES[name].mib


def test_a_sum_that_is_left_out_is_seen(monkeypatch):
    """Negative control."""
    monkeypatch.setattr("jax_fp8.ops.passes.reduce_rows", lambda rows, tensor: rows)
    counts, _ = h200.over_the_wire(compile_step("tensor 4"))
    assert counts["all-reduce", "bf16"] == 13 - LEFT_OUT


@on_each(*MODES)
def test_kernels_are_gathered_in_fp8(name):
    """In more bits: embedding and positions, rows of the loss, and the gradient of the embedding's rows."""
    assert gathers(compiled(name), "f8e4m3fn", "f8e5m2") == gathered_in_fp8(MODES[name])
    assert gathers(compiled(name), "f32", "bf16", "f16") == MODES[name].wide


@pytest.mark.slow
def test_kernels_gathered_as_they_are_are_seen(monkeypatch):
    """Negative control."""
    monkeypatch.setattr("jax_fp8.distributed.shard_trace.can_be_gathered_in_fp8", lambda places: False)
    program = compile_step("fsdp 4")
    assert not gathers(program, "f8e4m3fn")
    assert len(gathers(program, "f32", "bf16")) > len(MODES["fsdp 4"].wide)


@pytest.mark.parametrize(("cache_weights", "times"), [(True, 1), pytest.param(False, 4, marks=pytest.mark.slow)])
def test_four_microbatches_gather_kernels_once(cache_weights, times):
    """And, the negative control, in each microbatch where weights are not to be kept."""
    program = compile_step("fsdp 4", microbatches=4, cache_weights=cache_weights)
    in_fp8 = gathered_in_fp8(MODES["fsdp 4"])
    assert gathers(program, "f8e4m3fn") == {array: times * count for array, count in in_fp8.items()}


@on_each(*MODES)
def test_no_activation_is_summed_in_float32(name):
    assert float32_elements(compiled(name)) == summed_elements(name)


@pytest.mark.slow
def test_activations_summed_in_float32_are_seen(monkeypatch):
    """Negative control."""

    def in_float32(rows, tensor):
        return reduce_rows(rows.astype(jnp.float32), tensor).astype(rows.dtype)

    monkeypatch.setattr("jax_fp8.ops.passes.reduce_rows", in_float32)
    more = LEFT_OUT * 8 * SEQ * WIDTH
    assert float32_elements(compile_step("tensor 4")) == summed_elements("tensor 4") + more


@on_each(*SPLIT)
def test_gradients_are_summed_beside_weight_gradients(name):
    """Those of what enters a half of a layer; forward, nothing is there to be computed meanwhile."""
    sums = sums_of_rows(compiled(name), name)
    assert [of.products > 0 for of in sums] == [False] * (1 + 2 * LAYERS) + [True] * 2 * LAYERS


@pytest.mark.slow
def test_gradients_that_wait_for_no_weight_gradient_are_summed_alone(monkeypatch):
    """Negative control."""
    for op in ("passes", "norm_mlp"):
        monkeypatch.setattr(f"jax_fp8.ops.{op}.beside_wgrad", lambda dx, gradients, *gemms: (dx, gradients))
    name = "tensor 4, sequence"
    assert [of.products for of in sums_of_rows(compile_step(name), name)] == [0] * (1 + 4 * LAYERS)
