"""What an equation holds, in every kind that holds a function; and which operands reach it as what."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from holders import CALLS, COUNTS, HOLDERS
from jax import lax

from jax_fp8.jaxprs.equations import (
    all_equations,
    called_jaxpr,
    inner_jaxprs,
    is_view,
    scan_parts,
    turns,
    variables,
)

pytestmark = pytest.mark.versions

X, Y = jnp.ones((3, 4)), jnp.ones((4,))


def equations(function, *args) -> list:
    return jax.make_jaxpr(function)(*args).jaxpr.eqns


def only(name, function, *args):
    """The one equation of this name that a function has, on any level."""
    (found,) = [each for each, _ in all_equations(jax.make_jaxpr(function)(*args)) if each.primitive.name == name]
    return found


def held_by(name):
    """The equation that holds `jnp.sin`; the condition of a branch comes before it."""
    return equations(HOLDERS[name](jnp.sin), X)[-1]


def names(jaxpr) -> Counter:
    return Counter({equation.primitive.name: count for equation, count in all_equations(jaxpr)})


@pytest.mark.parametrize("name", HOLDERS)
def test_what_is_held_is_found_with_how_often_it_runs(name):
    holds = jax.make_jaxpr(HOLDERS[name](jnp.sin))(X).jaxpr
    assert names(holds)["sin"] == COUNTS[name] and not names(holds)["cos"]
    assert "sin" not in {equation.primitive.name for equation in holds.eqns}  # negative control: it is inside
    twice = jax.make_jaxpr(HOLDERS["scan"](HOLDERS[name](jnp.sin)))(X).jaxpr
    assert names(twice)["sin"] == 3 * COUNTS[name]


@pytest.mark.parametrize("name", HOLDERS)
def test_a_call_takes_its_operands_and_returns_its_results(name):
    called = called_jaxpr(held_by(name))
    assert (called is not None) == (name in CALLS)
    if called is not None:
        assert [equation.primitive.name for equation in called.eqns] == ["sin"]


def test_what_takes_elements_of_its_operands_is_no_call():
    """A reduction holds a function of two numbers, and takes an array and a number."""
    reduced = equations(lambda x: lax.reduce(x, 0.0, lambda a, b: a * b + a, (0,)), Y)[-1]
    assert len(inner_jaxprs(reduced)) == 1 and called_jaxpr(reduced) is None
    solved = only("custom_linear_solve", lambda x: jnp.linalg.solve(jnp.eye(4), x), Y)
    assert len(inner_jaxprs(solved)) == 4 and called_jaxpr(solved) is None
    assert not inner_jaxprs(equations(jnp.sin, X)[0]) and called_jaxpr(equations(jnp.sin, X)[0]) is None


def test_branches_for_a_platform():
    def function(x):
        return lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos, default=jnp.tan)

    chosen = equations(function, X)[-1]
    found = {name: [jaxpr.eqns[0].primitive.name for jaxpr in inner_jaxprs(chosen, name)] for name in ("cuda", "tpu")}
    assert found == {"cuda": ["cos"], "tpu": ["tan"]}
    assert [jaxpr.eqns[0].primitive.name for jaxpr in inner_jaxprs(chosen)] == ["sin", "cos", "tan"]
    assert len(inner_jaxprs(held_by("cond"), "cuda")) == 2  # negative control: a branch by a value


def of_all(stack, first, shared):
    """A scan with a constant that is a number, one that has the shape of what is carried, and one that is a Ref."""
    total = jax.new_ref(shared)

    def body(carry, element):
        h, count = carry
        total[...] += element
        return (h * shared + element, count + 1), (h, element.sum() * 2.5)

    (h, count), ys = lax.scan(body, (first, 0), stack)
    return h, count, ys, total[...]


def alone(stack, first, _):
    return lax.scan(lambda h, _: (2 * h, None), first, length=3)[0]


def only_stacks(stack, *_):
    return lax.scan(lambda _, x: (None, 2 * x), None, stack)[1]


def shapes(atoms) -> list:
    return [getattr(atom.aval, "shape", None) for atom in atoms]


SCANS = {  # a function; its constants; what it carries, as shapes; stacks; results that are stacks
    "all": (of_all, 2, [(4,), ()], 1, 2),
    "a carry alone": (alone, 0, [(4,)], 0, 0),
    "stacks alone": (only_stacks, 0, [], 1, 1),
    "reversed": (lambda s, f, _: lax.scan(lambda h, x: (h + x, h), f, s, reverse=True), 0, [(4,)], 1, 1),
    "of a map": (lambda s, f, c: lax.map(lambda x: x * c, s), 1, [], 1, 1),
    "a loop of known length": (lambda s, f, c: lax.fori_loop(0, 3, lambda i, h: h * c, f), 1, [(), (4,)], 0, 0),
    "in a jit": (jax.jit(alone), 0, [(4,)], 0, 0),
    "vmapped": (jax.vmap(lambda s: lax.scan(lambda h, x: (h + x, h), 0.0, s)), 0, [(3,)], 1, 1),
}


@pytest.mark.parametrize("case", SCANS)
def test_the_parts_of_a_scan(case):
    function, consts, carry, stacks, ys = SCANS[case]
    args = (X,) if case == "vmapped" else (X, Y, Y)
    equation = only("scan", function, *args)
    parts = scan_parts(equation)
    found = [equation.invars[part] for part in (parts.consts, parts.carry, parts.xs)]
    assert [*map(len, found)] == [consts, len(carry), stacks]
    assert [*found[0], *found[1], *found[2]] == equation.invars
    assert shapes(found[1]) == carry
    last, left = equation.outvars[parts.last_carry], equation.outvars[parts.ys]
    assert (shapes(last), len(left)) == (carry, ys)
    assert_fits(equation)


def assert_fits(equation):
    """Constants and carry as the body has them, and elements of stacks."""
    body, consts, carry, xs, last_carry, ys = scan_parts(equation)
    taken, made = shapes(equation.invars), shapes(equation.outvars)
    in_body, out_of_body = shapes(body.invars), shapes(body.outvars)
    assert taken[consts] == in_body[consts] and taken[carry] == in_body[carry]
    assert taken[carry] == made[last_carry] == out_of_body[last_carry]
    assert taken[xs] == [(turns(equation), *shape) for shape in in_body[xs]]
    assert made[ys] == [(turns(equation), *shape) for shape in out_of_body[ys]]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit, jax.vmap], ids=["", "remat", "jit", "vmap"])
def test_the_parts_of_the_scans_of_a_gradient(wrap):
    """jax makes them itself: of what is kept for the backward, constants, and stacks, in another order."""

    def loss(stack, first, shared):
        def body(carry, x):
            h, key = carry
            return (jnp.sin(h * shared) * x, key + 1), h

        return jnp.sum(lax.scan(wrap(body) if wrap is not jax.vmap else body, (first, 0), stack)[0][0])

    function = jax.grad(loss, (0, 1, 2))
    args = (X, Y, Y)
    if wrap is jax.vmap:
        function, args = jax.vmap(function), tuple(jnp.stack([arg, arg]) for arg in args)
    scans = [each for each, _ in all_equations(jax.make_jaxpr(function)(*args)) if each.primitive.name == "scan"]
    assert len(scans) >= 2
    for equation in scans:
        assert_fits(equation)
    _, *places = scan_parts(scans[-1])
    assert all(scans[-1].invars[place] for place in places[:3])  # the backward has constants, carry and xs


def test_turns():
    (scan,), (loop,) = ([held_by(name)] for name in ("scan", "while"))
    assert (turns(scan), turns(loop), turns(loop, unknown=1), turns(held_by("jit"))) == (3, math.inf, 1, 1)


def test_literals_are_no_variables():
    (added,) = equations(lambda x: x + 1.0, X)
    assert len(added.invars) == 2 and variables(added.invars) == added.invars[:1]


def test_views():
    """The same elements in the same order."""
    views = [lambda x: x.reshape(2, 6), lambda x: x[None], lambda x: lax.squeeze(x[:, None], (1,)),
             lambda x: lax.broadcast_in_dim(x, (3, 1, 4), (0, 2)), lambda x: lax.expand_dims(x, (0,))]  # fmt: skip
    others = [lambda x: x.T, lambda x: x + 1, lambda x: x[:2], lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (1, 2)),
              lambda x: lax.rev(x, (0,)), lambda x: lax.reshape(x, (12,), (1, 0))]  # fmt: skip
    assert all(is_view(equation) for view in views for equation in equations(view, X))
    assert not any(all(map(is_view, equations(other, X))) for other in others)
