"""States made operation by operation: the numbers of one program, each array where it belongs, none beside its work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from holders import HOLDERS
from hybrid import make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fp8.train import initialize
from jax_fp8.train.initialize import make_by_array

pytestmark = pytest.mark.versions

KEY, WIDTH, COUNT = jax.random.key(0), 64, 4


def one_by_one(key):
    """Arrays of which each takes two operations and more."""
    return {str(n): 2 * jax.random.normal(jax.random.fold_in(key, n), (WIDTH, WIDTH)) for n in range(COUNT)}


def all_at_once(key):
    """The same numbers, each doubled only when the last one is there."""
    drawn = [jax.random.normal(jax.random.fold_in(key, n), (WIDTH, WIDTH)) for n in range(COUNT)]
    return {str(n): 2 * x for n, x in enumerate(drawn)}


def made(function, *args, shardings=None):
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return make_by_array(program, shapes, shardings, *args)


def test_the_numbers_are_those_of_the_function():
    state = made(one_by_one, KEY)
    jax.tree.map(np.testing.assert_array_equal, state, one_by_one(KEY))
    assert not np.array_equal(state["0"], state["1"])


@pytest.mark.parametrize("name", HOLDERS)
def test_whatever_holds_an_operation(name):
    def function(x):
        return HOLDERS[name](jnp.sin)(x * 2), HOLDERS[name](jnp.cos)(x)

    x = jnp.linspace(0.0, 1.0, 12)
    sine, cosine = made(function, x)
    np.testing.assert_array_equal((sine, cosine), function(x))
    assert not np.array_equal(sine, cosine)


def test_each_array_lies_where_it_belongs():
    mesh = make_mesh(fsdp=2, tensor=2)
    shardings = {str(n): NamedSharding(mesh, P(*spec)) for n, spec in enumerate([("fsdp",), (None, "tensor"), (), ()])}
    state = made(one_by_one, KEY, shardings=shardings)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    assert [state[n].addressable_shards[0].data.shape for n in "012"] == [(32, 64), (64, 32), (64, 64)]
    jax.tree.map(np.testing.assert_array_equal, state, one_by_one(KEY))


@pytest.mark.parametrize("is_placed", [False, True])
def test_what_is_no_result_of_an_operation(is_placed):
    """An argument, a constant of the program, a number, and a result that is there twice: arrays of their own, for a
    step donates each.
    """
    table = np.arange(4, dtype=np.float32)

    def function(x):
        doubled = 2 * x
        return x, jnp.asarray(table), 3, (doubled, doubled)

    x = jnp.ones(4)
    everywhere = NamedSharding(make_mesh(data=1), P())
    shardings = (everywhere, everywhere, everywhere, (everywhere, everywhere)) if is_placed else None
    state = made(function, x, shardings=shardings)
    argument, constant, number, (first, second) = state
    np.testing.assert_array_equal(argument, x)
    np.testing.assert_array_equal(constant, table)
    assert number == 3 and number.dtype == jnp.int32
    np.testing.assert_array_equal(first, 2 * x)
    np.testing.assert_array_equal(second, 2 * x)
    buffers = [array.unsafe_buffer_pointer() for array in (x, *jax.tree.leaves(state))]
    assert len(set(buffers)) == len(buffers)


@pytest.fixture
def evaluated(monkeypatch):
    """Of each operation: its name, and how many arrays there are beside what it makes and what is placed already."""
    seen, evaluate = [], initialize._evaluate

    def watched(jaxpr, equation, values):
        seen.append((str(equation.primitive), sum(value.size == WIDTH**2 for value in values.values())))
        return evaluate(jaxpr, equation, values)

    monkeypatch.setattr(initialize, "_evaluate", watched)
    return seen


def test_only_what_is_needed_is_computed(evaluated):
    made(lambda x: (jnp.sin(x), jnp.cos(x))[0], jnp.ones(4))
    assert [name for name, _ in evaluated] == ["sin"]
    evaluated.clear()
    made(lambda x: (jnp.sin(x), jnp.cos(x)), jnp.ones(4))
    assert [name for name, _ in evaluated] == ["sin", "cos"]


@pytest.mark.parametrize(("function", "at_a_time"), [(one_by_one, 1), (all_at_once, COUNT)])
def test_an_array_is_let_go_when_it_is_placed(function, at_a_time, evaluated):
    """All are there only where the function itself keeps them: the negative control."""
    made(function, KEY)
    assert max(count for _, count in evaluated) == at_a_time
