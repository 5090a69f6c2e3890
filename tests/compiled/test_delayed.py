"""A pass with delayed weight gradients compiled for an H200 with no GPU: its GEMMs are in the second program only, and
what lies between the two is written once, by the kernels that quantize.
"""

import flax.linen as nn
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
MODEL, TOKENS = fp8.GPT(CONFIG), jax.ShapeDtypeStruct((16, 129), jnp.int32)
KERNELS = (256, 256), (256, 1024), (1024, 256)


class Shared(nn.Module):
    """One layer, called twice: its operands stand side by side."""

    @nn.compact
    def __call__(self, x):
        layer = fp8.Dense(256, use_bias=False)
        return layer(nn.tanh(layer(x)))


def variables_of(module, x):
    return jax.eval_shape(module.init, jax.random.key(0), x)


def compiled(function, *shapes) -> h200.Program:
    return h200.compile(jax.jit(function), *(h200.shapes(each, h200.on_one_device()) for each in shapes))


def gemms(program: h200.Program) -> int:
    return program.custom_calls["jax_fp8_gemm"]


def wgrads(program: h200.Program) -> int:
    """GEMMs of weight gradients."""
    return sum(i.target == "jax_fp8_gemm" and "/wgrad" in i.op_name for i in program.instructions)


def moved(program: h200.Program) -> list:
    """Arrays in FP8 that something else than a kernel of this library writes."""
    launched = (i for i in program.instructions if i.launches and i.opcode != "custom-call")
    return [i for i in launched if any(result.dtype.startswith("f8") for result in i.results)]


def added(program: h200.Program) -> int:
    """Arrays as large as kernels that something else than a kernel of this library writes."""
    return sum(len(program.making("f32", *shape)) for shape in KERNELS)


def test_weight_gradients_are_in_the_second_program(monkeypatch):
    monkeypatch.setattr(passes, "SMALLEST_WGRAD", 0)  # as of a model of a size that pays
    loss_fn, variables = fp8.next_token_loss(MODEL), variables_of(MODEL, jax.ShapeDtypeStruct((16, 128), jnp.int32))
    delayed = fp8.value_and_grad(loss_fn, delay_wgrad_compute=True)

    def both(variables, tokens):
        _, grads, _, deferred = delayed(variables, tokens)
        return jax.tree.map(jnp.add, grads, fp8.backward_dw(deferred))

    ordinary, first = (compiled(f, variables, TOKENS) for f in (fp8.value_and_grad(loss_fn), delayed))
    second = compiled(fp8.backward_dw, jax.eval_shape(delayed, variables, TOKENS)[3])
    assert (wgrads(ordinary), wgrads(first), wgrads(second)) == (LAYERS * WGRADS, 0, LAYERS * WGRADS)
    assert gemms(ordinary) == gemms(first) + gemms(second) and gemms(second) == LAYERS * WGRADS
    assert ordinary.custom_calls - first.custom_calls == second.custom_calls  # nothing is quantized again
    assert not moved(first) and not moved(second)

    together = compiled(both, variables, TOKENS)
    assert gemms(together) == gemms(ordinary)
    assert added(together) == added(ordinary) == 0 < added(first)  # the zeros of the first program alone


def test_operands_of_two_calls_are_put_side_by_side():
    """Which costs a pass over them; and shows that `moved` finds one."""
    module, x = Shared(), jax.ShapeDtypeStruct((128, 256), jnp.bfloat16)
    delayed = fp8.value_and_grad(lambda v, x: jnp.sum(module.apply(v, x)), delay_wgrad_compute=True)
    first = compiled(delayed, variables_of(module, x), x)
    assert wgrads(first) == 0 and moved(first)
