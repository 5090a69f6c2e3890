"""Dropout compiled for an H200: a kernel that drops and adds on the way up, one that drops on the way down, no mask."""

import flax.linen as nn
import h200
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.nn import dropout

REASON = h200.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

BATCH, SEQ, WIDTH = 1, 512, 256


def mlp(**fields):
    return fp8.LayerNormMLP(4 * WIDTH, residual=True, recipe=fp8.CurrentScaling(), **fields)


def passes(module):
    """Kernels of XLA that write as much as the residual stream of an MLP and its gradients: how much of it each reads.

    The last is the program.
    """

    def forward_and_backward(variables, x, dy, key):
        rngs = {"dropout": jax.random.wrap_key_data(key)}
        y, pull = jax.vjp(lambda *args: module.apply(*args, rngs=rngs), variables, x)
        return y, pull(dy)

    x = jax.ShapeDtypeStruct((BATCH, SEQ, WIDTH), jnp.bfloat16)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    shapes = (h200.shapes(of, h200.on_mesh(h200.mesh(data=1))) for of in (variables, x, x, key))
    program = h200.compile(jax.jit(forward_and_backward), *shapes)
    made = [of for of in program.making("bf16", SEQ, WIDTH) if of.opcode == "fusion"]
    return sorted(sum(operand.shape[-2:] == (SEQ, WIDTH) for operand in of.operands) for of in made), program


def test_a_pass_up_and_a_pass_down_and_no_mask():
    """Down: dropped, one array of the other; and the residual's gradient, which the norm's backward no longer adds."""
    assert passes(mlp())[0] == []
    found, program = passes(mlp(dropout_rate=0.1, deterministic=False))
    assert found == [1, 2, 2]
    for dtype in ("pred", "u32", "f32"):  # neither a mask, nor what it is drawn from, nor an array of 32 bits
        assert not [of for of in program.making(dtype, SEQ, WIDTH) if of.opcode == "fusion"]


def test_a_mask_that_is_kept_is_seen(monkeypatch):
    """A negative control: Flax's dropout."""

    def of_flax(x, key, rate, residual=None, tensor=None):
        dropped = nn.Dropout(rate, deterministic=False).apply({}, x, rngs={"dropout": key})
        return dropped if residual is None else dropped + residual

    monkeypatch.setattr(dropout, "dropout", of_flax)
    _, program = passes(mlp(dropout_rate=0.1, deterministic=False))
    assert program.making("pred", SEQ, WIDTH)
