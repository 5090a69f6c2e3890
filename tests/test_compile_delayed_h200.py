"""A pass with delayed weight gradients compiled for an H200 with no GPU: its GEMMs are in the second program only, and
what lies between the two is written once, by the kernels that quantize.
"""

import re

import h200
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.kernels import extension
from jax_fp8.ops import passes

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

LAYERS, WGRADS = 2, 6  # a layer's: of query, key, value, out, up and down
CONFIG = fp8.GPTConfig(vocab_size=512, num_layers=LAYERS, num_heads=4, hidden_size=256, max_seq_len=128)
MODEL, TOKENS = fp8.GPT(CONFIG), (16, 129)


def compiled(function, *shapes) -> h200.Program:
    return h200.compile(jax.jit(function), *(h200.shapes(each, h200.on_one_device()) for each in shapes))


def wgrads(program: h200.Program) -> int:
    """GEMMs of weight gradients, and their share of all."""
    return len(re.findall(r'custom_call_target="jax_fp8_gemm".*op_name="[^"]*/wgrad/', program.hlo))


def fp8_copies(program: h200.Program) -> list:
    """Arrays in FP8 that no kernel of this library writes."""
    return [
        i for i in program.instructions if i.launches and i.opcode != "custom-call" and i.results[0].dtype[:2] == "f8"
    ]


def test_weight_gradients_are_in_the_second_program(monkeypatch):
    monkeypatch.setattr(passes, "SMALLEST_WGRAD", 0)  # as of a model of a size that pays
    loss_fn, tokens = fp8.next_token_loss(MODEL), jax.ShapeDtypeStruct(TOKENS, jnp.int32)
    variables = jax.eval_shape(lambda tokens: MODEL.init(jax.random.key(0), tokens[:, :-1]), tokens)
    delayed = fp8.value_and_grad(loss_fn, delay_wgrad_compute=True)
    deferred = jax.eval_shape(delayed, variables, tokens)[3]

    ordinary, first = (compiled(f, variables, tokens) for f in (fp8.value_and_grad(loss_fn), delayed))
    second = compiled(fp8.backward_dw, deferred)
    assert (wgrads(ordinary), wgrads(first), wgrads(second)) == (LAYERS * WGRADS, 0, LAYERS * WGRADS)
    gemms = [program.custom_calls["jax_fp8_gemm"] for program in (ordinary, first, second)]
    assert gemms[0] == gemms[1] + gemms[2] and gemms[2] == LAYERS * WGRADS
    assert ordinary.custom_calls["jax_fp8_quantize"] == first.custom_calls["jax_fp8_quantize"]
    print(
        fp8_copies(ordinary),
        fp8_copies(first),
        fp8_copies(second),
        first.copies,
        second.copies,
        first.custom_calls,
        ordinary.custom_calls,
        second.custom_calls,
    )
    print(first.graphs, ordinary.graphs, second.graphs)
    assert not fp8_copies(first) and not fp8_copies(second)
