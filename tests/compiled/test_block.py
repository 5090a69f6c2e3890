"""Block scaling compiled for an H200, with no GPU: GEMMs read scales as the casts have written them."""

import flax.linen as nn
import h200
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.core.cast import LINE, SQUARE
from jax_fp8.kernels import extension
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

WIDTH, TOKENS, LAYERS = 1024, 2048, 2
SCALES = [(WIDTH // 128, TOKENS), (TOKENS // 128, WIDTH), (WIDTH // 128, WIDTH // 128), (WIDTH // 128, TOKENS // 128)]


class Stack(nn.Module):
    recipe: fp8.BlockScaling

    @nn.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            x = fp8.LayerNormMLP(WIDTH, "gelu", recipe=self.recipe)(x)
        return x


def compiled(microbatches=1, change=lambda x: x, cached=False) -> h200.Program:
    recipe, rows = fp8.BlockScaling(), jax.ShapeDtypeStruct((TOKENS * microbatches, WIDTH), jnp.bfloat16)
    model = Stack(recipe)

    def loss_fn(variables, x):
        return jnp.mean(jnp.square(change(model.apply(variables, x)).astype(jnp.float32)))

    step = fp8.make_train_step(
        loss_fn, fp8.fused_adamw(1e-3), recipe, microbatches, compiler_options=CUDA_GRAPH_OPTIONS
    )
    one = jnp.zeros((16, WIDTH), jnp.bfloat16)

    def with_cache(key):
        variables = dict(model.init(key, one))
        return {**variables, "fp8_cache": fp8.cast_weights(variables, recipe, forward=lambda v: model.apply(v, one))}

    init = (with_cache,) if cached else (lambda key, x: model.init(key, x), one)
    state = step.state_shapes(init[0], jax.random.key(0), *init[1:])
    on = h200.on_one_device()
    return h200.compile(step, h200.shapes(state, on), h200.shapes(rows, on))


def scales_made(program) -> list[str]:
    """Whatever makes scales alone: the kernels that cast make values, too."""
    found = (made for shape in SCALES for made in program.making("f32", *shape))
    return [str(made) for made in found if all(result.dtype == "f32" for result in made.results)]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_nothing_is_between_casts_and_gemms(microbatches):
    program = compiled(microbatches)
    calls = {name: count for name, count in program.custom_calls.items() if "by_tile" in name}
    gemms, weights = 2 * LAYERS, 2 * LAYERS
    assert calls == {
        "jax_fp8_norm_quantize_by_tile": LAYERS,
        "jax_fp8_activation_quantize_by_tile": LAYERS,
        "jax_fp8_quantize_by_tile": weights,
        "jax_fp8_quantize_by_tile_sums": LAYERS,
        "jax_fp8_activation_backward_quantize_by_tile": LAYERS,
    }
    assert program.custom_calls["jax_fp8_gemm"] == 3 * gemms and not program.gemms_of("bf16", "f16", "f32")
    assert scales_made(program) == []
    assert (program.graphs, dict(program.outside_graphs)) == (1, {})
    assert program.report.weight_casts == weights


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_optimizer_writes_the_weights_of_a_cache(microbatches):
    """They are cast only where they are stale, in a branch of the one conditional, whose other branch does nothing."""
    program, weights = compiled(microbatches, cached=True), 2 * LAYERS
    assert (program.custom_calls["jax_fp8_adam"], program.custom_calls["jax_fp8_quantize_by_tile"]) == (1, weights)
    [(keep, cast)] = program.report.conditionals
    assert (program.report.weight_casts, keep.kernels, cast.weight_casts) == (0, 0, weights)
    assert program.report.weight_copies == () and scales_made(program) == []
    assert (program.graphs, dict(program.outside_graphs)) == (1, {})


def cut_in_graph(program) -> list[str]:
    """GEMMs that begin with a part of an array: commands that a CUDA graph has to update in every step."""
    found = (made for made in program.instructions if made.opcode == "fusion" and made.results[-1].dtype == "u8")
    return list(map(str, found))


def test_a_gemm_finds_the_scales_of_its_columns_itself():
    """Queries, keys and values are parts of a product, of which each has squares of its own."""
    layer = fp8.SelfAttention(8, recipe=fp8.BlockScaling())
    x = jax.ShapeDtypeStruct((2, TOKENS // 2, 8 * 384), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def gradient(variables, x):
        return fp8.value_and_grad(lambda v: jnp.sum(layer.apply(v, x).astype(jnp.float32)))(variables)

    def product(x, w):
        half, one = x.shape[0] // 2, jnp.float32(1)
        return fp8.matmul(fp8.Fp8Array(x[:half], one), fp8.Fp8Array(w, one))

    on = h200.on_one_device()
    step = jax.jit(gradient, compiler_options=CUDA_GRAPH_OPTIONS)
    program = h200.compile(step, h200.shapes(variables, on), h200.shapes(x, on))
    assert program.custom_calls["jax_fp8_gemm"] == 3 + 1 + 1 + 3 + 1  # nobody asks for dx
    assert cut_in_graph(program) == []
    matrix = h200.shapes(jax.ShapeDtypeStruct((TOKENS, WIDTH), fp8.E4M3), on)
    assert len(cut_in_graph(h200.compile(jax.jit(product), matrix, matrix))) == 1


def test_scales_that_are_made_anew_are_found():
    """Rows that are no multiple of 16 are filled up, and so are their scales."""

    def fprop(x, w):
        return fp8.matmul(fp8.Fp8Array(x, scales(x, LINE), LINE), fp8.Fp8Array(w, scales(w, SQUARE), SQUARE))

    def scales(x, tile):
        return jnp.full((-(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1])), 0.5)

    on = h200.on_one_device()
    x, w = (h200.shapes(jax.ShapeDtypeStruct((rows, WIDTH), fp8.E4M3), on) for rows in (TOKENS - 2, WIDTH))
    program = h200.compile(jax.jit(fprop), x, w)
    assert program.custom_calls["jax_fp8_gemm"] == 1 and scales_made(program)
