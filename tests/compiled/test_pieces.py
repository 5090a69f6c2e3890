"""A step in pieces on a mesh, of two layers of GPT-3 1.3B, compiled for four H200s: what each piece moves between
devices, and what it updates in place.
"""

import dataclasses
import itertools
import math

import h200
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import jax_fp8 as fp8
from jax_fp8.distributed.microbatches import shapes_of_pending
from jax_fp8.kernels import extension
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS
from jax_fp8.train.programs import Programs

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SEQ, WIDTH, LAYERS, BATCH = 2048, 2048, 2, 8
AXES = {"fsdp": 2, "tensor": 2}
KINDS = [pytest.param(kind, id=kind.name) for kind in (AxisType.Auto, AxisType.Explicit)]
SMALL = 2**20  # bytes: of scalars and amaxes


@pytest.fixture(autouse=True)
def _cudnn(monkeypatch, traced_anew):
    """A version of cuDNN for whoever asks, as on a machine that has it."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)


def pieces(kind, **options):
    """The step, and shapes of its state, of what is pending, and of a microbatch."""
    model = fp8.GPT(fp8.GPTConfig.preset("gpt3-1.3b", num_layers=LAYERS))
    mesh = h200.mesh(kind, **AXES)
    parallel = fp8.Parallelism(mesh, sequence_parallel=True)
    step = fp8.make_train_step(
        fp8.next_token_loss(model), fp8.fused_adamw(1e-3), model.recipe, 2, parallel=parallel,
        compiler_options=CUDA_GRAPH_OPTIONS, **options,
    )  # fmt: skip
    state = step.state_shapes(model.init, jax.random.key(0), jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32))
    microbatch = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32, sharding=h200.on_mesh(mesh, "fsdp"))
    return step, state, shapes_of_pending(step._programs.parallel, state), microbatch


def bytes_of(tree) -> int:
    """On each device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compile_end(kind) -> tuple[h200.Program, int]:
    step, state, pending, _ = pieces(kind)
    return h200.compile(step._apply, state, pending), bytes_of((state, pending))


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_a_step_moves_nothing_between_devices(kind):
    program, size = compile_end(kind)
    assert not program.collectives and program.graphs == 1 and not program.outside_graphs
    assert 0 <= size - program.aliased_bytes < SMALL and program.temp_bytes < SMALL


def inside_alone(constrain):
    """Holds a state in its place in the branch of the conditional only, and neither before nor after it."""
    calls = itertools.count()
    return lambda state: constrain(state) if next(calls) == 1 else state


def test_shards_that_are_gathered_by_the_conditional_are_seen(monkeypatch):
    """Negative control."""
    constrain = Programs._constrain
    monkeypatch.setattr(Programs, "_constrain", lambda *args: inside_alone(constrain(*args)))
    program, size = compile_end(AxisType.Auto)
    assert program.all_gathers and size - program.aliased_bytes > SMALL


def compile_microbatch(kind, cache_weights) -> tuple[h200.Program, int]:
    """And the bytes of what is pending."""
    step, state, pending, microbatch = pieces(kind, cache_weights=cache_weights)
    first = jax.ShapeDtypeStruct((), jnp.bool_, sharding=h200.on_mesh(h200.mesh(kind, **AXES)))
    with pytest.MonkeyPatch.context() as patch:  # to make params, without cuDNN, no attention is needed
        h200.use_cudnn(patch)
        if cache_weights:
            weights = step._programs.mesh_pass(state, microbatch, 1).shapes_of_weights(state, microbatch)
            pending = dataclasses.replace(pending, cache=weights)
        return h200.compile(step._accumulate, state, pending, microbatch, first), bytes_of(pending)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_microbatch_adds_in_place_and_gathers_kernels_in_a_conditional(kind):
    """Where weights are not kept, the negative control, there is none, and every microbatch sends the kernels."""
    (kept, size), (anew, size_without) = (compile_microbatch(kind, cache_weights) for cache_weights in (True, False))
    for program, pending in ((kept, size), (anew, size_without)):
        assert 0 <= pending - program.aliased_bytes < SMALL
        assert all(copy.results[0].bytes < SMALL for copy in program.copies)
    assert (kept.outside_graphs["Conditional"], anew.outside_graphs["Conditional"]) == (1, 0)
    kernels = LAYERS * 12 * WIDTH**2 // AXES["tensor"]  # bytes of FP8, of which a device sends half
    assert h200.over_the_wire(anew)[1] - h200.over_the_wire(kept)[1] == pytest.approx(kernels / 2, abs=SMALL)
    assert size - size_without == pytest.approx(2 * kernels, abs=SMALL)  # kept in both orientations
