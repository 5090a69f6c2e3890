"""Without dead code a program computes the same results, and has nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from holders import HOLDERS
from jax.extend.core import jaxpr_as_fun

from jax_fp8.jaxprs.dead_code import without_dead_code
from jax_fp8.jaxprs.equations import all_equations

pytestmark = pytest.mark.versions

X = jnp.linspace(0.0, 1.0, 12).reshape(3, 4)
TABLE = np.arange(4, dtype=np.float32)


def names(program) -> list[str]:
    return [equation.primitive.name for equation, _ in all_equations(program.jaxpr)]


@pytest.mark.parametrize("name", HOLDERS)
def test_what_a_result_needs_stays(name):
    hold = HOLDERS[name]
    program = jax.make_jaxpr(lambda x: (hold(jnp.sin)(x + 1), hold(jnp.cos)(x) * TABLE))(X)
    whole = jaxpr_as_fun(program)(X)
    for number, (needed, dead) in enumerate([("sin", "cos"), ("cos", "sin")]):
        alone = without_dead_code(program, [program.jaxpr.outvars[number]])
        assert needed in names(alone) and dead not in names(alone)
        np.testing.assert_array_equal(*jaxpr_as_fun(alone)(X), whole[number])
    assert names(without_dead_code(program)) == names(program)  # negative control: nothing is dead


def test_of_a_chain_all_stays():
    program = jax.make_jaxpr(lambda x: (jnp.cos(x), jnp.sin(jnp.exp(jnp.tanh(x))))[1])(X)
    assert names(without_dead_code(program)) == ["tanh", "exp", "sin"]
    assert names(program) == ["cos", "tanh", "exp", "sin"]


def test_results_may_be_arguments_and_numbers():
    program = jax.make_jaxpr(lambda x: (x, 1.0, jnp.sin(x)))(X)
    alone = without_dead_code(program, program.jaxpr.outvars[:2])
    assert not names(alone)
    same, one = jaxpr_as_fun(alone)(X)
    np.testing.assert_array_equal(same, X)
    assert one == 1


def test_writes_to_what_is_read_stay():
    """In their order, also from inside of a loop; those to a Ref that nobody reads go."""

    def run(x):
        wanted, unwanted = jax.new_ref(x), jax.new_ref(x)
        wanted[...] *= 2
        unwanted[...] = jnp.cos(x)
        jax.lax.fori_loop(0, 3, lambda i, _: wanted.__setitem__(..., wanted[...] + jnp.sin(x)), None)
        return wanted[...]

    program = jax.make_jaxpr(run)(X)
    alone = without_dead_code(program)
    assert "cos" in names(program) and "cos" not in names(alone) and "sin" in names(alone)
    np.testing.assert_array_equal(*jax.jit(jaxpr_as_fun(alone))(X), jax.jit(run)(X))
