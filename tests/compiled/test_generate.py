"""`generate` compiled for an H200 with no GPU: one CUDA graph reads the prompts, and one a token with weights that were
cast before.
"""

import dataclasses
import math

import h200
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.inspect.hlo import CALLS, FUSIONS, by_computation, executed
from jax_fp8.kernels import cached_attention, chain, extension, few_rows_gemm
from jax_fp8.kernels.grouped_gemm import TARGET, grouped_matmul
from jax_fp8.models import reader
from jax_fp8.models.generate import BLOCK
from jax_fp8.ops import grouped_linear
from jax_fp8.ops.expert_rows import rows_needed

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

BATCH, SEQ, NEW, WIDTH = 8, 512, 64, 256
CONFIG = fp8.GPTConfig(vocab_size=1024, num_layers=1, num_heads=4, hidden_size=WIDTH, max_seq_len=1024)
LLAMA = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "num_kv_heads": 1, "use_bias": False}
EXPERTS = dataclasses.replace(CONFIG, num_experts=4, use_bias=False)
ROWS = rows_needed(2 * BATCH, EXPERTS.num_experts)  # of a token for each text
OUTSIDE = {"While", "CustomKernel", "Copy"}  # loops, their conditions, and the number of a block's first token
CASTS = "jax_fp8_quantize_transpose"  # what casts weights, and in a forward nothing else


def compiled(model):
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
    prompt = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    write = jax.jit(lambda *arrays: fp8.generate(model, *arrays, max_new_tokens=NEW))
    return h200.compile(write, *h200.shapes((variables, prompt), h200.on_one_device()))


def weights_made_in_the_loop(program) -> list:
    """What casts, copies or joins an array as large as a weight for every token; the caches have a dim of the batch."""
    (entry,) = {i.computation for i in program.instructions if i.in_entry}
    ran = executed(by_computation(program.instructions), entry, CALLS | FUSIONS)
    in_the_loop = [instruction for instruction, times in ran if times == BLOCK]
    assert any(instruction.target for instruction in in_the_loop)
    return [
        instruction
        for instruction in in_the_loop
        for result in instruction.results
        if instruction.launches
        and result.dtype in ("f8e4m3fn", "bf16", "f32")
        and math.prod(result.shape) >= WIDTH * WIDTH
        and not {BATCH, ROWS} & set(result.shape)
    ]


@pytest.mark.parametrize(
    ("recipe", "head", "casts"),
    [(fp8.DelayedScaling(), fp8.CurrentScaling(), 5), (None, None, 0)],
    ids=["FP8", "bf16"],
)
def test_no_weight_is_cast_or_joined_for_a_token(recipe, head, casts, monkeypatch, with_kernels):
    h200.use_cudnn(monkeypatch)
    program = compiled(fp8.GPT(CONFIG, recipe=recipe, head_recipe=head))
    assert program.custom_calls[CASTS] == casts  # once, for the prompts and for all tokens
    assert program.graphs == 2 and set(program.outside_graphs) <= OUTSIDE
    assert not [copy for copy in program.copies if copy.results[0].bytes > 2**16]  # of a cache
    assert not weights_made_in_the_loop(program)


@pytest.mark.parametrize(("most_rows", "gemms"), [(BATCH, 4), (BATCH - 1, 0)])
def test_a_token_takes_few_launches_by_the_kernels_for_it(most_rows, gemms, monkeypatch, with_kernels):
    """A layer has four GEMMs and one attention a token, and these kernels do all that is between them."""
    h200.use_cudnn(monkeypatch)
    monkeypatch.setattr(few_rows_gemm, "KERNEL_ROWS", most_rows)
    monkeypatch.setattr(few_rows_gemm, "MOST_ROWS", most_rows)
    monkeypatch.setattr(chain, "CHOSEN", False)
    program = compiled(fp8.GPT(CONFIG))
    assert program.custom_calls[few_rows_gemm.TARGET] == gemms and program.custom_calls[cached_attention.TARGET] == 1
    for_tokens = 0 if gemms else 1  # beside those for the prompts
    assert program.custom_calls["jax_fp8_norm_quantize"] == 2 * (1 + for_tokens)
    assert program.custom_calls["jax_fp8_activation_quantize"] == 1 + for_tokens
    assert program.graphs == 2 and set(program.outside_graphs) <= OUTSIDE
    assert not [copy for copy in program.copies if copy.results[0].bytes > 2**16]  # of a cache
    assert not weights_made_in_the_loop(program)


@pytest.mark.parametrize("fields", [{}, LLAMA], ids=["gpt", "llama"])
def test_the_kernels_of_a_token_are_one_call(fields, monkeypatch, with_kernels):
    """All kernels of ours in two layers."""
    h200.use_cudnn(monkeypatch)
    program = compiled(fp8.GPT(dataclasses.replace(CONFIG, num_layers=2, **fields)))
    assert program.custom_calls[chain.TARGET] == 1
    assert program.custom_calls[few_rows_gemm.TARGET] == program.custom_calls[cached_attention.TARGET] == 0
    assert program.graphs == 2 and set(program.outside_graphs) <= OUTSIDE
    assert not [copy for copy in program.copies if copy.results[0].bytes > 2**16]  # of a cache
    assert not weights_made_in_the_loop(program)


def test_experts_are_cast_before_the_first_token(monkeypatch, with_kernels):
    h200.use_cudnn(monkeypatch)
    program = compiled(fp8.GPT(EXPERTS, head_recipe=fp8.CurrentScaling()))
    assert program.custom_calls[CASTS] == 5 and program.custom_calls[TARGET] == 2 * 2  # for the prompts, and for tokens
    assert program.graphs == 2 and set(program.outside_graphs) <= OUTSIDE
    assert not weights_made_in_the_loop(program)


def test_experts_that_are_transposed_for_every_token_are_found(monkeypatch, with_kernels):
    h200.use_cudnn(monkeypatch)
    one_after_the_other = lambda *operands, side_by_side=False, **how: grouped_matmul(*operands, **how)  # noqa: E731
    monkeypatch.setattr(grouped_linear, "grouped_matmul", one_after_the_other)
    found = weights_made_in_the_loop(compiled(fp8.GPT(EXPERTS)))
    assert {made.results[0].dtype for made in found} == {"f8e4m3fn"}


def test_a_weight_that_is_cast_for_every_token_is_found(monkeypatch, with_kernels):
    h200.use_cudnn(monkeypatch)
    monkeypatch.setattr(reader, "cast_gemms", lambda *_: {})
    found = weights_made_in_the_loop(compiled(fp8.GPT(CONFIG)))
    assert CASTS in {instruction.target for instruction in found}
