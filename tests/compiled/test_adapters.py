"""Adapters compiled for an H200, with no GPU: nothing multiplies for a gradient that no optimizer reads."""

import dataclasses
import re
from collections import Counter

import h200
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.kernels import extension
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

LAYERS, WIDTH, HIDDEN, VOCAB, TOKENS = 2, 256, 640, 1024, 384  # no width is the number of tokens
CONFIG = fp8.GPTConfig.preset(
    "tiny-llama", num_layers=LAYERS, num_heads=2, num_kv_heads=1, hidden_size=WIDTH, mlp_hidden_size=HIDDEN,
    vocab_size=VOCAB, max_seq_len=TOKENS,
)  # fmt: skip
# Shapes (in, features) of the kernels, and of kernels side by side, whose gradient is cut; and the table of the head.
KERNELS = {(WIDTH, WIDTH), (WIDTH, 128), (WIDTH, 512), (WIDTH, HIDDEN), (WIDTH, 2 * HIDDEN), (HIDDEN, WIDTH)}
KERNELS |= {(VOCAB, WIDTH)}


def compiled(recipe, freezes: bool, is_frozen: bool = False, microbatches: int = 1, mesh=None) -> h200.Program:
    """A step of adapters; `freezes`: the optimizer freezes all else; `is_frozen`: kernels are frozen in FP8, apart on a
    mesh.
    """
    model = fp8.GPT(
        CONFIG, recipe=recipe, lora=fp8.Lora(rank=16), param_dtype=jnp.bfloat16, attention_implementation="xla"
    )
    adam = fp8.fused_adamw(1e-4)
    tx = fp8.freeze(adam, trained="lora_") if freezes else adam
    loss = fp8.next_token_loss(model)
    step = fp8.make_train_step(loss, tx, recipe, microbatches, parallel=mesh, compiler_options=CUDA_GRAPH_OPTIONS)

    def init(key, tokens):
        variables = model.init(key, tokens)
        return fp8.freeze_kernels(variables, recipe, apart=mesh is not None) if is_frozen else variables

    state = step.state_shapes(init, jax.random.key(0), jax.ShapeDtypeStruct((1, TOKENS), jnp.int32))
    on = h200.on_one_device() if mesh is None else h200.on_mesh(mesh)
    tokens = jax.ShapeDtypeStruct((microbatches, TOKENS + 1), jnp.int32)
    return h200.compile(step, h200.shapes(state, on) if mesh is None else state, h200.shapes(tokens, on))


def weight_gradients(program: h200.Program) -> list:
    """The GEMMs whose result has the shape of a kernel, or of the head's table, or its transpose."""
    shapes = KERNELS | {shape[::-1] for shape in KERNELS}
    return [gemm for gemm in program.gemms if any(result.shape in shapes for result in gemm.results)]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("recipe", [None, fp8.DelayedScaling()], ids=["bf16", "delayed"])
def test_frozen_params_have_no_weight_gradients(recipe, microbatches):
    assert weight_gradients(compiled(recipe, True, microbatches=microbatches)) == []


def test_without_freeze_there_are_some():
    """The control: every kernel, some of them side by side, and the head."""
    assert len(weight_gradients(compiled(fp8.DelayedScaling(), False))) >= 4 * LAYERS + 1


def test_frozen_kernels():
    """Seven products forward in a layer and four backward; a weight is transposed once for those, and none is cast.

    The input of the first layer needs no gradient: the embeddings are frozen.
    """
    program = compiled(fp8.DelayedScaling(), True, is_frozen=True)
    assert weight_gradients(program) == []
    assert program.custom_calls["jax_fp8_gemm"] == (7 + 4) * LAYERS - 1
    assert program.custom_calls["jax_fp8_transpose"] == 4 * LAYERS - 1
    assert program.report.weight_casts == 0
    assert (program.graphs, dict(program.outside_graphs)) == (1, {})


def test_frozen_kernels_that_tensor_splits():
    """Each device multiplies by its own parts, as they lie, and no weight is gathered. Only what dgrad reads of several
    kernels is joined: query, key and value, gate and up.
    """
    program = compiled(fp8.DelayedScaling(), True, is_frozen=True, mesh=h200.mesh(tensor=2))
    assert program.custom_calls["jax_fp8_gemm"] == (7 + 4) * LAYERS - 1
    assert program.custom_calls["jax_fp8_transpose"] == 4 * LAYERS - 1
    assert program.report.weight_casts == 0
    assert not [gather for gather in program.all_gathers if "f8" in str(gather.results)]
    joined = re.findall(r"= f8e4m3fn\[(\d+),\d+\]\{1,0\} fusion\(", program.hlo)
    own, whole = WIDTH // 2, 128  # one head of keys and values for both devices
    assert Counter(map(int, joined)) == {own + 2 * whole: LAYERS - 1, HIDDEN: LAYERS}


def growth(remat: str) -> float:
    """MiB that one more layer of 1,024 features adds to what a step over tensor=2 keeps of 2,048 tokens."""

    def temp_mib(layers: int) -> float:
        config = dataclasses.replace(
            CONFIG, num_layers=layers, hidden_size=1024, mlp_hidden_size=4096, max_seq_len=2048
        )
        options = {"param_dtype": jnp.bfloat16, "remat": remat, "attention_implementation": "xla"}
        model = fp8.GPT(config, recipe=None, lora=fp8.Lora(rank=16), **options)
        tx = fp8.freeze(fp8.fused_adamw(1e-4), trained="lora_")
        mesh = h200.mesh(tensor=2)
        step = fp8.make_train_step(
            fp8.next_token_loss(model), tx, None, parallel=mesh, compiler_options=CUDA_GRAPH_OPTIONS
        )
        state = step.state_shapes(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2048), jnp.int32))
        tokens = jax.ShapeDtypeStruct((1, 2049), jnp.int32)
        return h200.compile(step, state, h200.shapes(tokens, h200.on_mesh(mesh))).temp_bytes / 2**20

    return (temp_mib(4) - temp_mib(2)) / 2


def test_remat_saves_memory_over_tensor():
    """A layer keeps its input, 4 MiB, and little else: no adapter's gradient waits for the end of the step, with its
    operands. Without remat, which is the control, a layer keeps several times as much.
    """
    assert 4 <= growth("full") < 12
    assert growth("none") > 30
