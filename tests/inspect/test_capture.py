"""capture_report: the graphs, casts and copies of small programs whose numbers are known,
each beside one that must be told apart.
"""

import h200
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jax_fp8 as fp8
from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import KERNEL
from jax_fp8.inspect.capture import CAST_TARGETS, Branch, CaptureReport, capture_report
from jax_fp8.kernels import extension
from jax_fp8.kernels.quantize import quantize_transpose
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS
from jax_fp8.train.lowering import Lowering

REASON = h200.missing_reason()
needs_compiler = pytest.mark.skipif(REASON is not None, reason=str(REASON))
needs_kernels = pytest.mark.skipif(
    bool(REASON or extension.missing_reason()), reason=str(REASON or extension.missing_reason())
)

SIZE = 512
BYTES = SIZE * SIZE  # of a weight in FP8
LAYERS = 4


def shape(*dims, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=h200.on_one_device())


WEIGHT, STACK = (SIZE, SIZE), (LAYERS, SIZE, SIZE)


def cast(weight, scale, scope="cast_weights"):
    with jax.named_scope(scope):
        pair = quantize_transpose(weight, Cast.with_scale(fp8.E4M3, scale))
    return pair.arrays[:2]


def lowered(function, *arguments, donate=(), **options):
    options = {**CUDA_GRAPH_OPTIONS, **options}
    return jax.jit(function, donate_argnums=donate, compiler_options=options).lower(*arguments)


def refreshed(flag, weights, cache, scale):
    return lax.cond(flag, lambda _: jax.tree.map(lambda w: cast(w, scale), weights), lambda kept: kept, cache)


def refresh_arguments(size=SIZE):
    names = ("up", "down")
    cache = {name: (shape(size, size, dtype=fp8.E4M3),) * 2 for name in names}
    return shape(dtype=bool), {name: shape(size, size) for name in names}, cache, shape(dtype=jnp.float32)


@pytest.mark.parametrize(
    "how",
    [Cast.with_scale(fp8.E4M3, 1.0), fp8.BlockScaling().cast(KERNEL, None, lambda: jnp.float32(1))],
    ids=["one", "tiles"],
)
def test_every_kernel_that_casts_a_weight_is_known(how, with_kernels):
    traced = jax.jit(lambda weight: quantize_transpose(weight, how)).trace(jnp.zeros(WEIGHT, jnp.bfloat16))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert sum(text.count(f"@{target}(") for target in CAST_TARGETS) == 1


@needs_kernels
@pytest.mark.parametrize(("scope", "counted"), [("cast_weights", 1 + LAYERS), ("cast_inputs", 0)])
def test_casts_are_counted_as_often_as_loops_run_them(scope, counted):
    def casts(weight, stack, scale):
        return cast(weight, scale, scope), lax.scan(lambda _, w: (None, cast(w, scale, scope)), None, stack)[1]

    report = capture_report(lowered(casts, shape(*WEIGHT), shape(*STACK), shape(dtype=jnp.float32)))
    assert report.weight_casts == counted
    assert (report.graphs, report.cuts, report.conditionals) == (1, {}, ())
    assert (report.collectives, report.wire_bytes) == ((), 0)


@needs_kernels
@pytest.mark.skipif(h200.COPIES_IN_BRANCHES, reason="the compiler of jaxlib 0.10 copies in branches")
def test_a_cache_is_one_conditional_that_keeps_without_a_kernel():
    report = capture_report(lowered(refreshed, *refresh_arguments(), donate=2))
    assert report.conditionals == ((Branch(0, 0), Branch(2, 2)),)
    assert report.weight_casts == 0  # whatever branch is taken
    assert (report.graphs, report.cuts) == (1, {})
    assert (report.weight_copies, report.all_copies_bytes) == ((), 0)
    assert report.aliased_bytes == 4 * BYTES
    assert report.argument_bytes == 2 * 2 * BYTES + 4 * BYTES + 1 + 4


@needs_kernels
@pytest.mark.parametrize(("size", "copied_bytes"), [(SIZE, 4 * BYTES), (128, 0)], ids=["large", "below 64 KiB"])
def test_a_cache_that_is_not_donated_is_copied(size, copied_bytes):
    report = capture_report(lowered(refreshed, *refresh_arguments(size)))
    assert len(report.weight_copies) == 4
    assert all(copy.startswith(f"f8e4m3fn[{size},{size}] = copy(") for copy in report.weight_copies)
    assert (report.all_copies_bytes, report.aliased_bytes) == (copied_bytes, 0)
    assert report.conditionals == ((Branch(0, 4), Branch(2, 2)),)


@needs_kernels
def test_products_of_a_branch_are_its_own():
    def chosen(index, x, weight, scale):
        def multiply(x):
            pair = quantize_transpose(x, Cast.with_scale(fp8.E4M3, scale))
            return fp8.matmul(pair.rowwise, fp8.Fp8Array(weight, scale))

        return lax.switch(index, [lambda x: x, multiply, lambda x: multiply(multiply(x))], x)

    arguments = shape(dtype=jnp.int32), shape(*WEIGHT), shape(*WEIGHT, dtype=fp8.E4M3), shape(dtype=jnp.float32)
    report = capture_report(lowered(chosen, *arguments))
    assert [branch.gemms for branch in report.conditionals[0]] == [0, 1, 2]
    assert report.gemms == 0 and "FP8 matrix products       0 outside of branches" in str(report).splitlines()


@needs_kernels
def test_products_are_counted_as_often_as_loops_run_them():
    def layers(stack, x, scale):
        def layer(x, weight):
            pair = quantize_transpose(x, Cast.with_scale(fp8.E4M3, scale))
            return fp8.matmul(pair.rowwise, fp8.Fp8Array(weight, scale)), None

        return lax.scan(layer, x, stack)[0]

    arguments = shape(*STACK, dtype=fp8.E4M3), shape(*WEIGHT), shape(dtype=jnp.float32)
    report = capture_report(lowered(layers, *arguments))
    assert (report.gemms, report.weight_casts) == (LAYERS, 0)
    assert len(report.weight_copies) == h200.COPIES_IN_BRANCHES  # a slice of the stack, in the loop


def loop(x):
    return lax.scan(lambda carry, _: (jnp.sin(carry).T + carry, None), x, length=3)[0]


@needs_compiler
def test_work_outside_graphs_is_named():
    whole = capture_report(lowered(loop, shape(*WEIGHT)))
    assert (whole.graphs, whole.cuts) == (1, {})
    without = capture_report(lowered(loop, shape(*WEIGHT), xla_gpu_enable_command_buffer=""))
    assert without.graphs == 0
    assert without.cuts["While"] == 1 and without.cuts["CustomKernel"] >= 2


@needs_compiler
def test_a_collective_cuts_a_graph_and_is_named():
    mesh = h200.mesh(data=2)

    def mean(x):
        return jnp.sin(lax.pmean(jnp.cos(x), "data"))

    summed = jax.shard_map(mean, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    x = jax.ShapeDtypeStruct(WEIGHT, jnp.float32, sharding=h200.on_mesh(mesh, "data"))
    report = capture_report(lowered(summed, x))
    assert report.cuts["AllReduce"] == 1
    assert report.graphs == 2
    assert report.wire_bytes == SIZE * SIZE // 2 * 4
    assert "over the wire             0.5 MiB a device and step" in str(report).splitlines()
    assert str(report).splitlines()[-1].split() == ["1", "all-reduce", "f32", "of", "2", "0.50", "0.00", "0.00", "0.50"]


@needs_compiler
def test_what_a_branch_sends_is_listed_and_not_in_the_sum():
    mesh = h200.mesh(data=2)

    def sent(flag, x):
        summed = lax.cond(flag, lambda x: lax.psum(x, "data"), lambda x: x, x)
        return lax.all_gather(jnp.sin(summed), "data")

    split = jax.shard_map(sent, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    flag, x = h200.shapes((jnp.zeros((), bool), jnp.zeros(WEIGHT)), h200.on_mesh(mesh))
    report = capture_report(lowered(split, flag, x))
    assert sorted((each.kind, each.in_branch) for each in report.collectives) == [
        ("all-gather", False),
        ("all-reduce", True),
    ]
    assert report.wire_bytes == SIZE * SIZE * 4


@needs_compiler
def test_a_loop_of_unknown_length_is_said_to_be():
    def until(x):
        return lax.while_loop(lambda x: x[0, 0] < 100, lambda x: x + 1, x)

    report = capture_report(lowered(until, shape(*WEIGHT)))
    assert report.unknown_trips == 1
    assert "loops of unknown length   1" in str(report)
    known = capture_report(lowered(loop, shape(*WEIGHT)))
    assert known.unknown_trips == 0
    assert "unknown" not in str(known)


@needs_compiler
def test_a_lowering_and_what_it_compiles_to_give_the_same_report():
    program = lowered(lambda x: x + 1, shape(*WEIGHT))
    compilation = Lowering(program).compile()
    assert capture_report(compilation) == capture_report(program) == capture_report(Lowering(program))
    assert compilation.as_text() == compilation.compiled.as_text()


@needs_compiler
def test_a_compilation_that_left_no_listing_is_an_error(tmp_path):
    compilation = Lowering(lowered(lambda x: x + 1, shape(*WEIGHT))).compile({"xla_dump_to": str(tmp_path)})
    assert list(tmp_path.glob("*.thunk_sequence*.txt"))
    with pytest.raises(RuntimeError, match="got a compilation that left none"):
        capture_report(compilation)


def test_what_holds_no_listing_is_refused():
    program = jax.jit(lambda x: x + 1)
    on_cpu = program.lower(jnp.ones(3))
    with pytest.raises(ValueError, match="needs a program compiled for a CUDA device, got platform cpu; lower it with"):
        capture_report(on_cpu)
    with pytest.raises(ValueError, match="writes only while it compiles, got a compiled program without it; pass the"):
        capture_report(on_cpu.compile())
    with pytest.raises(ValueError, match=r"needs a lowered program, got PjitFunction; pass step\.lower"):
        capture_report(program)


def test_a_printed_report_is_a_table():
    report = CaptureReport(
        graphs=2,
        cuts={"AllReduce": 3, "While": 1},
        weight_casts=8,
        conditionals=((Branch(0, 0), Branch(8, 9)),),
        weight_copies=tuple(f"copy {i}" for i in range(9)),
        all_copies_bytes=3 * 2**20,
        gemms=24,
        temp_bytes=2**19,
        aliased_bytes=2**30,
        argument_bytes=2**31,
        unknown_trips=0,
    )
    rows = str(report).splitlines()
    assert "launched outside them     3 AllReduce, 1 While" in rows
    assert "a conditional             0 casts, 0 kernels | 8 casts, 9 kernels" in rows
    assert "FP8 matrix products       24" in rows
    assert "copied, arrays > 64 KiB   3.0 MiB" in rows
    assert "copy 7" in str(report) and "copy 8" not in str(report)
    assert len(rows) < 25 and rows[-1] == "scratch                   0.5 MiB"  # one device sends nothing
