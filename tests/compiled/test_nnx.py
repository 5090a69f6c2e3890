"""Steps of NNX models and of Flax's own layers, compiled for an H200: the GEMMs and casts of our Linen layers, no more.

The loops are those of one's own: gradients, an optimizer that adds, `update_state`. What is counted of the Linen
program is what is asked of the others, and the same model without FP8 must fail.
"""

import functools
from typing import Any

import flax.linen as nn
import h200
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jax_fp8 as fp8
import jax_fp8.nnx
from jax_fp8.kernels import extension

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

WIDTH, ROWS = 512, 2048
RECIPE = fp8.DelayedScaling(amax_history_len=16)
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
TX = fp8.fused_adamw(1e-3)


class Linen(nn.Module):
    dense: Any

    @nn.compact
    def __call__(self, x):
        for name in "abc":
            x = nn.gelu(self.dense(WIDTH, use_bias=False, name=name)(x))
        return x


class OfNnx(nnx.Module):
    def __init__(self, linear=fp8.nnx.Linear, **options):
        rngs = nnx.Rngs(0)
        for name in "abc":
            setattr(self, name, linear(WIDTH, WIDTH, use_bias=False, dtype=jnp.bfloat16, rngs=rngs, **options))

    def __call__(self, x):
        for layer in (self.a, self.b, self.c):
            x = nnx.gelu(layer(x))
        return x


def mean_square(y):
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def compiled(step, *arguments) -> h200.Program:
    on = h200.on_one_device()
    return h200.compile(jax.jit(step, donate_argnums=0), *(h200.shapes(argument, on) for argument in arguments))


def linen_program(dense) -> h200.Program:
    model = Linen(dense)

    def step(state, x):
        params, fp8_state, opt_state = state
        variables = {"params": params, "fp8": fp8_state}
        loss, grads, fp8_state = fp8.value_and_grad(lambda v, x: mean_square(model.apply(v, x)))(variables, x)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), fp8.update_state(fp8_state, RECIPE), opt_state), loss

    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    state = variables["params"], variables.get("fp8", {}), jax.eval_shape(TX.init, variables["params"])
    return compiled(step, state, X)


def nnx_program(make) -> h200.Program:
    """`nnx.jit` by Flax's functional interface, which the compiler can be given shapes through."""

    def create():
        model = make()
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    graphdef, shapes = nnx.split(nnx.eval_shape(create))

    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = fp8.nnx.value_and_grad(lambda model, x: mean_square(model(x)))(model, x)
        optimizer.update(model, grads)
        fp8.nnx.update_state(model)
        return nnx.state((model, optimizer)), loss

    return compiled(step, shapes, X)


def counted(program: h200.Program) -> dict:
    calls = program.custom_calls
    return {
        "gemms": calls["jax_fp8_gemm"],
        "gemms not in FP8": len(program.gemms_of("bf16", "f16", "f32")),
        "casts": sum(count for name, count in calls.items() if "quantize" in name),
        "update_state": calls["jax_fp8_update_state"],
        "copies": sum(copy.results[0].bytes >= WIDTH**2 for copy in program.copies),
    }


GEMMS = 8  # three a layer, but for the gradient of the batch
PROMISED = {"gemms": GEMMS, "gemms not in FP8": 0, "casts": 9, "update_state": 1, "copies": 0}


def converted():
    model = OfNnx(nnx.Linear)
    fp8.nnx.convert(model, RECIPE)
    return model


def product(recipe):
    return functools.partial(fp8.DotGeneral, recipe=recipe)


PROGRAMS = {
    "linen": lambda: linen_program(functools.partial(fp8.Dense, recipe=RECIPE)),
    "dot_general_cls": lambda: linen_program(
        functools.partial(nn.Dense, dtype=jnp.bfloat16, dot_general_cls=product(RECIPE))
    ),
    "nnx": lambda: nnx_program(lambda: OfNnx(recipe=RECIPE)),
    "converted": lambda: nnx_program(converted),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_step_is_that_of_our_linen_layers(program):
    assert counted(program()) == PROMISED


def test_a_step_without_fp8_is_not():
    found = counted(nnx_program(lambda: OfNnx(nnx.Linear)))
    assert found["gemms not in FP8"] == GEMMS and found["gemms"] == found["casts"] == found["update_state"] == 0


def test_kernels_of_three_dims_are_multiplied_as_they_lie():
    """The projections of attention: no transpose, no copy of a kernel or of an activation."""

    class Projections(nn.Module):
        @nn.compact
        def __call__(self, x):
            general = functools.partial(nn.DenseGeneral, use_bias=False, dtype=x.dtype, dot_general_cls=product(RECIPE))
            heads = nn.gelu(general((4, WIDTH // 4), name="query")(x))
            return general(WIDTH, axis=(-2, -1), name="out")(heads)

    model = Projections()
    variables = jax.eval_shape(model.init, jax.random.key(0), X)

    def step(variables, x):
        return fp8.value_and_grad(lambda v, x: mean_square(model.apply(v, x)))(variables, x)

    program = compiled(step, variables, X)
    found = counted(program)
    assert (found["gemms"], found["gemms not in FP8"], found["casts"], found["copies"]) == (5, 0, 6, 0)
    assert not [made for made in program.instructions if made.opcode == "transpose"]
