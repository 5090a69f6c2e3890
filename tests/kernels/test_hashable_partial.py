"""Operations of equal forms are traced once; those of others are traced again."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fp8 import value_and_grad
from jax_fp8.core.recipe import DelayedScaling
from jax_fp8.kernels.dispatch import _traced_once, dispatch
from jax_fp8.kernels.hashable_partial import hashable
from jax_fp8.nn.block import TransformerBlock


def add(*args, **keywords):
    return args, keywords


def test_a_form_is_called_as_the_partial():
    of = partial(partial(add, 1, a=2), 3, b=4)
    assert hashable(of)(5, c=6) == of(5, c=6) == ((1, 3, 5), {"a": 2, "b": 4, "c": 6})
    assert hashable(add) is add


def test_forms_are_equal_if_they_do_the_same():
    of = [hashable(partial(add, partial(add, 1), a=2, b=b)) for b in (3, 3, 4)]
    assert of[0] == of[1] != of[2] and len(set(of)) == 2
    assert partial(add, 1) != partial(add, 1)  # why there are forms


def traced(forms, mesh=None) -> int:
    """How often operations of these forms are traced in one program, each twice."""
    count = 0

    def reference(x, *, split, number, other=0):
        nonlocal count
        count += 1
        return (x * number,)

    def run(x):
        for form in forms(reference) * 2:
            (x,) = dispatch("m n -> m n", None, form, x)
        return x

    x = jnp.ones((16, 16)) if mesh is None else jax.device_put(jnp.ones((16, 16)), NamedSharding(mesh, P("data")))
    assert jax.eval_shape(run, x).shape == (16, 16)
    return count


FORMS = {
    "of one number": (lambda form: [partial(form, number=2.0), partial(form, number=2.0)], 1),
    "of a partial of a partial": (lambda form: [partial(partial(form, number=2.0), other=other) for other in "ab"], 2),
    "of a value without a hash": (lambda form: [partial(form, number=2.0, other=[])], 2),
    "of two numbers": (lambda form: [partial(form, number=2.0), partial(form, number=3.0)], 2),
}


@pytest.mark.parametrize("case", FORMS)
def test_an_operation_is_traced_once_for_all_alike(case):
    """Each of two forms of it, for CUDA and elsewhere."""
    forms, count = FORMS[case]
    mesh = jax.make_mesh((4,), ("data",))
    assert traced(forms) == traced(forms, mesh) == 2 * count


def test_arrays_of_another_shape_are_another_trace():
    form = partial(lambda x, split, number: (x * number,), number=2.0)
    found = jax.make_jaxpr(lambda *xs: [dispatch("m n -> m n", None, form, x)[0] for x in xs])
    shapes = [out.aval.shape for out in found(jnp.ones((2, 3)), jnp.ones((4, 5))).jaxpr.outvars]
    assert shapes == [(2, 3), (4, 5)]


def test_the_operations_of_a_layer_are_those_of_the_next(traced_anew):
    """No kernel is given anything that is made anew for each call."""
    block = TransformerBlock(2, 128, recipe=DelayedScaling())
    x = jnp.ones((1, 16, 64), jnp.bfloat16)
    variables = jax.eval_shape(block.init, jax.random.key(0), x)

    def gradient(variables, x):
        return value_and_grad(lambda variables, x: jnp.sum(block.apply(variables, x)))(variables, x)

    made = []
    for _ in range(2):
        jax.make_jaxpr(lambda *args: gradient(*args))(variables, x)
        made.append(_traced_once.cache_info().misses)
    assert made[0] == made[1] > 0
