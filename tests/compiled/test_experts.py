"""A training step with experts, compiled for H200s with no GPU: one CUDA graph, no work but on the rows that experts
have, weights cast once a step, and each by the optimizer where the state carries a cache. Over several GPUs that split
the experts, rows travel in the dtypes and numbers that they should.
"""

import dataclasses
import itertools
import math
from collections import Counter

import h200
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.grads import tape
from jax_fp8.inspect.hlo import CALLS, by_computation, executed
from jax_fp8.kernels import extension
from jax_fp8.kernels.grouped_gemm import GRADIENT_TARGET, TARGET, grouped_matmul
from jax_fp8.ops import expert_travel, grouped_linear
from jax_fp8.ops.expert_rows import rows_needed
from jax_fp8.ops.head import PLAIN_HEAD_SCOPE
from jax_fp8.ops.router import ROUTER_SCOPE
from jax_fp8.parallel import transfers
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

EXPERTS, WIDTH, HIDDEN, BATCH, SEQ = 4, 256, 512, 16, 128
SIZES = {"hidden_size": WIDTH, "mlp_hidden_size": HIDDEN, "num_experts": EXPERTS, "vocab_size": 768}
CONFIG = fp8.GPTConfig.preset("tiny-moe", num_layers=1, max_seq_len=SEQ, **SIZES)
WEIGHTS = 4  # queries, keys and values; attention output; gate and up; down
RECIPES = {"delayed": fp8.DelayedScaling(), "current": fp8.CurrentScaling(), "block": fp8.BlockScaling(), "none": None}
COLLECTIVES = {"AllReduce", "AsyncStart", "AsyncDone"}


def compiled(name, microbatches=1, cached=False, padded=False, config=CONFIG, sequence=False, **axes) -> h200.Program:
    axes = {axis: size for axis, size in axes.items() if size > 1}
    recipe, options = RECIPES[name], {}
    if axes:
        options["parallel"] = fp8.Parallelism(h200.mesh(**axes), sequence_parallel=sequence)
    model, tokens = fp8.GPT(config, recipe=recipe), jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32)

    def init(key, x):
        variables = dict(model.init(key, x))
        if cached:
            forward = lambda variables: model.apply(variables, x)  # noqa: E731
            variables["fp8_cache"] = fp8.cast_weights(variables, recipe, forward=forward)
        return variables

    options |= {"microbatches": microbatches, "compiler_options": CUDA_GRAPH_OPTIONS}
    step = fp8.make_train_step(fp8.next_token_loss(model), fp8.fused_adamw(1e-3), recipe, **options)
    state = step.state_shapes(init, jax.random.key(0), jnp.zeros((BATCH, SEQ), jnp.int32))
    batch = {"tokens": tokens, "lengths": jax.ShapeDtypeStruct((BATCH,), jnp.int32)} if padded else tokens
    if not axes:
        state, batch = h200.shapes((state, batch), h200.on_one_device())
    return h200.compile(step, state, batch)


def rows_of(tokens: int) -> int:
    return rows_needed(CONFIG.experts_per_token * tokens, EXPERTS)


def multiplications(program) -> int:
    """Of the products that are no custom calls of this library, in the layer of experts."""
    wide = [gemm for gemm in program.gemms_of("bf16", "f16", "f32") if "/mlp/" in gemm.op_name]
    return sum(_multiplications(gemm) for gemm in wide if ROUTER_SCOPE not in gemm.op_name)


def _multiplications(gemm) -> int:
    """(m k) (k n) / (m n) = k², with the dims of a batch cancelled too."""
    a, b, d = (math.prod(array.shape) for array in (*gemm.operands[:2], gemm.results[0]))
    batch = gemm.results[0].shape[0] if len(gemm.results[0].shape) == 3 else 1
    return d * math.isqrt(a // batch * (b // batch) // (d // batch))


def unquantized(program) -> list[str]:
    """Products of matrices in wide formats, but for the router's and the head's."""
    wide = program.gemms_of("bf16", "f16", "f32")
    by_design = ROUTER_SCOPE, PLAIN_HEAD_SCOPE
    return [str(gemm) for gemm in wide if not any(scope in gemm.op_name for scope in by_design)]


def larger_than_rows(program, tokens: int) -> list[str]:
    """What makes a matrix larger than the rows of all experts with gate and up, the largest there is."""
    most = rows_of(tokens) * 2 * HIDDEN
    found = [i for i in program.instructions if i.launches]
    made = [(str(i), result) for i in found for result in i.results if result.dtype not in ("s8", "u8")]  # workspaces
    return [name for name, result in made if math.prod(result.shape) > most and len(result.shape) > 1]


def scatters(program) -> list[str]:
    """Scatters of the layer whose indices may be alike: sums in an order that changes from run to run."""
    lines = [line for line in program.hlo.splitlines() if " scatter(" in line and "/mlp/" in line]
    return [line for line in lines if "unique_indices=true" not in line]


def transposed(program) -> int:
    """How often kernels of experts in FP8 are put in another order, in one call."""
    (entry,) = {i.computation for i in program.instructions if i.in_entry}
    ran = executed(by_computation(program.instructions), entry, CALLS)
    shapes = (EXPERTS, 2 * HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    return sum(
        times
        for i, times in ran
        if i.launches and not i.target and i.results[0].dtype == "f8e4m3fn" and i.results[0].shape in shapes
    )


def passes_over_sums(program) -> int:
    """How often XLA itself makes arrays in float32 of the size of an expert kernel's gradient: zeros, or sums. A custom
    call of which XLA cuts an operand is a fusion with the scope of the call.
    """
    (entry,) = {i.computation for i in program.instructions if i.in_entry}
    ran = executed(by_computation(program.instructions), entry, CALLS)
    sizes = [("f32", (EXPERTS, WIDTH, HIDDEN)), ("f32", (EXPERTS, HIDDEN, WIDTH))]
    own = [(i, times) for i, times in ran if i.launches and not i.target and "/wgrad/" not in i.op_name]
    return sum(times * sum((made.dtype, made.shape) in sizes for made in i.results) for i, times in own)


# Every recipe on one device and on two, and with one microbatch and with two; the others are slow.
FAST = {("delayed", 1, 1), ("delayed", 2, 2), ("current", 2, 1), ("current", 1, 2), ("block", 1, 1), ("block", 2, 2)}
STEPS = [
    pytest.param(*of, marks=() if of in FAST else pytest.mark.slow)
    for of in itertools.product(("delayed", "current", "block"), (1, 2), (1, 2))
]


@pytest.mark.parametrize(("name", "microbatches", "data"), STEPS)
def test_what_a_step_becomes(name, microbatches, data, monkeypatch, with_kernels):
    h200.use_cudnn(monkeypatch)
    program = compiled(name, microbatches, data=data)
    assert program.custom_calls[TARGET] == 4 and program.custom_calls[GRADIENT_TARGET] == 3
    assert unquantized(program) == [] and multiplications(program) == 0
    assert larger_than_rows(program, BATCH * SEQ // microbatches // data) == []
    assert scatters(program) == []
    assert (program.report.weight_casts, transposed(program)) == (WEIGHTS, 0)
    if data == 1:
        assert (program.graphs, dict(program.outside_graphs)) == (1, {})
    else:
        assert set(program.outside_graphs) <= COLLECTIVES | ({"While", "CustomKernel"} if microbatches > 1 else set())


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", ["delayed", "block"])
def test_the_optimizer_writes_the_kernels_of_a_cache(name, microbatches, monkeypatch, with_kernels):
    h200.use_cudnn(monkeypatch)
    program = compiled(name, microbatches, cached=True)
    [(keep, cast)] = program.report.conditionals
    assert (program.report.weight_casts, keep.kernels, cast.weight_casts) == (0, 0, WEIGHTS)
    assert program.report.weight_copies == () and transposed(program) == 0
    assert (program.graphs, dict(program.outside_graphs)) == (1, {})


def test_gradients_of_experts_are_added_by_the_gemms(monkeypatch, with_kernels):
    """In a loop over microbatches XLA only makes their first zeros. Negative control: it could add them, too."""
    h200.use_cudnn(monkeypatch)
    kernels = 3  # gate, up, down
    assert passes_over_sums(compiled("delayed", microbatches=2)) == kernels
    monkeypatch.setattr(tape, "added_by_gemms", lambda *_: [])
    assert passes_over_sums(compiled("delayed", microbatches=2)) >= 3 * kernels


def test_padding_is_left_out_in_the_same_graph(monkeypatch, with_kernels):
    h200.use_cudnn(monkeypatch)
    program = compiled("delayed", padded=True)
    assert (program.graphs, dict(program.outside_graphs), scatters(program)) == (1, {}, [])
    assert program.custom_calls[TARGET] == 4 and larger_than_rows(program, BATCH * SEQ) == []


def test_transposes_in_every_microbatch_are_found(monkeypatch, with_kernels):
    """Where a kernel reads matrices that lie one after the other, another one moves them there."""
    h200.use_cudnn(monkeypatch)
    one_after_the_other = lambda *operands, side_by_side=False, **how: grouped_matmul(*operands, **how)  # noqa: E731
    monkeypatch.setattr(grouped_linear, "grouped_matmul", one_after_the_other)
    assert transposed(compiled("delayed", microbatches=2)) == 2 * 2


def test_without_fp8_every_expert_multiplies_all_rows(monkeypatch, with_kernels):
    """`lax.ragged_dot` on this GPU: each product is one of all rows for every expert. A time of it is no baseline."""
    h200.use_cudnn(monkeypatch)
    program = compiled("none")
    once = 3 * rows_of(BATCH * SEQ) * (WIDTH * 2 * HIDDEN + HIDDEN * WIDTH)
    assert multiplications(program) == EXPERTS * once
    assert larger_than_rows(program, BATCH * SEQ)


# ---- experts on several GPUs -----------------------------------------------------------------------------------------

EIGHT = dataclasses.replace(CONFIG, num_experts=8)
RAGGED = "ragged-all-to-all"
WEIGHTS_OF_ROWS = {(RAGGED, "f32"): 2}
IN_FP8 = {(RAGGED, "f8e4m3fn"): 1, (RAGGED, "f8e5m2"): 1, (RAGGED, "bf16"): 2, **WEIGHTS_OF_ROWS}
IN_BF16 = {(RAGGED, "bf16"): 4, **WEIGHTS_OF_ROWS}


def traveling(program) -> dict[tuple[str, str], int]:
    """Collectives that move tokens or kernels, by kind and dtype. The others are sums of gradients, and small."""
    moved = [each for each in program.report.collectives if each.kind in (RAGGED, "all-to-all")]
    moved += [each for each in program.report.collectives if each.kind == "all-gather" and each.wire_bytes > 2**15]
    return dict(Counter((each.kind, dtype) for each in moved for dtype in each.dtypes for _ in range(each.times)))


def gradients_of_experts(program) -> list[int]:
    """Over how many devices each sum is that has as many elements as a device's experts, of four devices, or more."""
    least = EIGHT.num_experts // 4 * 3 * WIDTH * HIDDEN
    sums = [each for each in program.report.collectives if each.kind == "all-reduce"]
    return [each.devices for each in sums if sum(math.prod(array.shape) for array in each.arrays) >= least]


@pytest.mark.parametrize(
    ("name", "axes", "wanted"),
    [
        ("delayed", {"expert": 4}, IN_FP8),
        pytest.param("delayed", {"expert": 8}, IN_FP8, marks=pytest.mark.slow),
        pytest.param("current", {"expert": 4}, IN_FP8, marks=pytest.mark.slow),
        ("block", {"data": 2, "expert": 4}, IN_BF16),
        pytest.param("none", {"expert": 4}, IN_BF16, marks=pytest.mark.slow),
    ],
)
def test_rows_travel_and_kernels_of_experts_stay(name, axes, wanted, monkeypatch, with_kernels):
    h200.use_cudnn(monkeypatch)
    program = compiled(name, config=EIGHT, **axes)
    assert traveling(program) == wanted
    tokens = BATCH * SEQ // math.prod(axes.values()) * CONFIG.experts_per_token
    rows = {array.shape for each in program.report.collectives if each.kind == RAGGED for array in each.arrays}
    assert rows == {(tokens, WIDTH), (tokens, 1)}
    assert gradients_of_experts(program) == [axes[axis] for axis in ("data",) if axis in axes]
    if name != "none":
        assert program.custom_calls[TARGET] == 4 and unquantized(program) == []


IN_FP8_GATHERED = {"f8e4m3fn": 2, "f8e5m2": 2}  # of attention and of experts: inputs, and output gradients


@pytest.mark.parametrize(
    ("name", "sequence", "axes"),
    [
        ("delayed", True, {"tensor": 2}),
        ("delayed", True, {"expert": 2, "tensor": 2}),
        pytest.param("delayed", False, {"tensor": 4}, marks=pytest.mark.slow),
        ("block", False, {"tensor": 2}),
    ],
)
def test_tensor_splits_each_expert(name, sequence, axes, monkeypatch, with_kernels):
    """With sequence parallelism tokens are gathered in FP8, and what the router says of them as it is."""
    h200.use_cudnn(monkeypatch)
    program = compiled(name, config=EIGHT, sequence=sequence, **axes)
    assert program.custom_calls[TARGET] == 4 and unquantized(program) == []
    gathered = Counter(
        dtype for each in program.report.collectives if each.kind == "all-gather" for dtype in each.dtypes
    )
    assert {dtype: gathered[dtype] for dtype in IN_FP8_GATHERED if gathered[dtype]} == (
        IN_FP8_GATHERED if sequence else {}
    )
    assert gradients_of_experts(program) == []


def zeros_that_wait(program) -> int:
    """The most arrays of a device's own rows that one fusion makes: zeros, into which rows return."""
    rows = BATCH * SEQ // 4 * CONFIG.experts_per_token, WIDTH
    fusions = [i for i in program.instructions if i.launches and i.opcode == "fusion"]
    return max(sum(made.shape == rows for made in i.results) for i in fusions)


def test_zeros_into_which_rows_travel_are_made_one_by_one(monkeypatch, with_kernels):
    """Negative control: zeros that depend on nothing are made in one kernel for forward and backward."""
    h200.use_cudnn(monkeypatch)
    assert zeros_that_wait(compiled("delayed", config=EIGHT, expert=4)) == 1
    of_nothing = lambda rows, count: (rows, jnp.zeros((count, *rows.shape[1:]), rows.dtype))  # noqa: E731
    monkeypatch.setattr(expert_travel, "_with_zeros", of_nothing)
    assert zeros_that_wait(compiled("delayed", config=EIGHT, expert=4)) == 2


def test_a_sum_of_gradients_of_other_experts_is_seen(monkeypatch, with_kernels):
    h200.use_cudnn(monkeypatch)
    monkeypatch.setattr(transfers, "axes_of_sum", lambda parallel, place: transfers.summed_axes(parallel))
    assert gradients_of_experts(compiled("delayed", config=EIGHT, expert=4)) == [4]
