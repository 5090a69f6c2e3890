"""A program under the name of another layer computes the same; all of its equations have the new name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from holders import HOLDERS
from jax.extend.core import jaxpr_as_fun

from jax_fp8.jaxprs.equations import all_equations
from jax_fp8.jaxprs.scopes import with_scope

pytestmark = pytest.mark.versions

X = jnp.linspace(0.0, 1.0, 12).reshape(3, 4)


def layer(hold, x):
    """A scope around what holds an operation, and one inside of it."""

    def inner(x):
        with jax.named_scope("layer_1"), jax.named_scope("gemm"):
            return jnp.sin(x)

    with jax.named_scope("layer_1"):
        y = hold(inner)(jnp.cos(x))
    with jax.named_scope("layer_10"):
        return jnp.exp(y)


def scopes(program) -> list[list[str]]:
    return [str(equation.source_info.name_stack).split("/") for equation, _ in all_equations(program.jaxpr)]


@pytest.mark.parametrize("name", HOLDERS)
def test_every_equation_of_the_scope_has_the_new_name(name):
    program = jax.make_jaxpr(lambda x: layer(HOLDERS[name], x))(X)
    renamed = with_scope(program, "layer_1", "other")
    expected = [["other" if part == "layer_1" else part for part in scope] for scope in scopes(program)]
    assert scopes(renamed) == expected != scopes(program)
    assert any("layer_10" in scope for scope in expected)
    np.testing.assert_array_equal(jaxpr_as_fun(renamed)(X), jaxpr_as_fun(program)(X))


def test_the_same_name_is_the_same_program():
    program = jax.make_jaxpr(jnp.sin)(X)
    assert with_scope(program, "layer_1", "layer_1") is program
