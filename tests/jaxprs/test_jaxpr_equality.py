"""Two traced functions are alike if they compute the same, whatever their names; one number more or less and they are
not.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from holders import HOLDERS
from jax.ad_checkpoint import checkpoint_name

from jax_fp8.jaxprs.jaxpr_equality import compute_the_same

pytestmark = pytest.mark.versions

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
TABLE = np.arange(4, dtype=np.float32)


@jax.custom_vjp
def twice(x):
    return 2 * x


twice.defvjp(lambda x: (2 * x, None), lambda _, dy: (2 * dy,))


def alike(one, other, *args) -> bool:
    programs = (jax.make_jaxpr(lambda *given, of=of: of(*given))(*args or (X,)) for of in (one, other))
    return compute_the_same(*programs)


def named(name):
    def run(x):
        with jax.named_scope(name):
            return checkpoint_name(jnp.tanh(twice(x)) @ x.T, name)

    return run


def scaled(number):
    return lambda x: number * x


def shifted(table):
    return lambda x: x + jnp.asarray(table)


def in_a_loop(number):
    return lambda x: jax.lax.scan(lambda carry, row: (carry + number * row, carry), jnp.zeros(4), x)[0]


def held_by(name):
    return lambda number: HOLDERS[name](lambda x: jnp.where(x > number, x, 0.0))


def masked(seed):
    return lambda x: jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), seed), 0.5, x.shape) * x


def masked_by_key(seed):
    key = jax.random.key(seed)
    return lambda x: jax.random.bernoulli(key, 0.5, x.shape) * x


def power(exponent):
    return lambda x: jax.lax.integer_pow(x, exponent)


def on_rows(dim):
    return lambda x: jnp.sum(x[:, :3], dim)


MAKERS = {
    "a literal": (scaled, 2.0, 3.0),
    "a zero and its negative": (scaled, 0.0, -0.0),
    "a constant": (shifted, TABLE, TABLE[::-1]),
    "a number in a scan": (in_a_loop, 1.0, 2.0),
    "a seed": (masked, 0, 1),
    "a key that is a constant": (masked_by_key, 0, 1),
    "a parameter": (power, 2, 3),
    "a parameter among several": (on_rows, 0, 1),
} | {f"a number in {name}": (held_by(name), 0.0, 0.5) for name in HOLDERS}


@pytest.mark.parametrize("case", MAKERS)
def test_a_number_makes_the_difference(case):
    make, one, other = MAKERS[case]
    assert alike(make(one), make(one))
    assert not alike(make(one), make(other))


def test_names_do_not_count():
    assert alike(named("layer_0"), named("layer_1"))
    assert alike(shifted(TABLE), shifted(TABLE.copy())) and alike(scaled(np.nan), scaled(np.nan))


def test_what_goes_where_counts():
    """Also, where the operations are the same."""
    assert not alike(lambda x, y: (x - y, x), lambda x, y: (y - x, x), X, X)
    assert not alike(lambda x, y: (x - y, x), lambda x, y: (x - y, y), X, X)
    assert not alike(jnp.sin, jnp.cos) and not alike(jnp.sin, lambda x: jnp.sin(jnp.sin(x)))


def test_types_count():
    assert not compute_the_same(jax.make_jaxpr(jnp.sin)(X), jax.make_jaxpr(jnp.sin)(X[:2]))
    assert not compute_the_same(jax.make_jaxpr(jnp.sin)(X), jax.make_jaxpr(jnp.sin)(X.astype(jnp.bfloat16)))
