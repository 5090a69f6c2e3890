"""The two halves of a derivative are `jax.vjp`, bit for bit; between them lies what depends on x, and nothing else."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from holders import in_a_while_loop, with_a_jvp, with_a_vjp
from jax import lax
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

from jax_fp8.jaxprs.split_vjp import Halves, needed

pytestmark = pytest.mark.versions

ROWS, WIDTH, LAYERS = 4, 8, 2
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
SUMS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
ONES = [jnp.ones(of.shape) for of in SUMS]


def normal(seed, shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


CONSTANTS = {
    "kernels": [normal(number, (WIDTH, WIDTH)) for number in range(LAYERS)],
    "bias": normal(10, (WIDTH,), jnp.bfloat16),
}


def product(ref):
    """A product whose kernel's gradient is added to a Ref, as by the GEMMs of a layer; it keeps x twice."""

    @jax.custom_vjp
    def multiply(x, kernel):
        return x @ kernel

    def backward(kept, dy):
        x, kernel, again = kept
        ref[...] += x.T @ dy
        return dy @ kernel.T + 0 * again, jnp.zeros_like(kernel)

    multiply.defvjp(lambda x, kernel: (x @ kernel, (x, kernel, x)), backward)
    return multiply


def plain(x, kernel):
    return x @ kernel


def function(products, wrap=lambda layer: layer):
    """Layers with products like these, of constants and x; kernels are rounded first, which depends on them alone."""

    def run(constants, x):
        @wrap
        def layer(x, kernel, bias, number):
            rounded = kernel.astype(jnp.bfloat16).astype(jnp.float32)
            return jnp.tanh(products[number](x, rounded)) + bias

        h = x
        for number, kernel in enumerate(constants["kernels"]):
            h = layer(h, kernel, constants["bias"], number)
        return h + x * jnp.sin(x), {"mean": jnp.mean(h)}

    return run


def of_plain(wrap) -> Halves:
    run = function([plain] * LAYERS, wrap)
    return Halves(lambda constants, x, refs: jax.vjp(run, constants, x), lambda: None, _shapes(CONSTANTS), X)


def of_refs() -> Halves:
    def pull_back(constants, x, refs):
        return jax.vjp(function([product(ref) for ref in refs]), constants, x)

    return Halves(pull_back, lambda: [jax.new_ref(jnp.zeros(of.shape)) for of in SUMS], _shapes(CONSTANTS), X)


def _shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def of_dy(y):
    """A gradient of the result."""
    return jax.tree.map(jnp.cos, y)


def backward_of(halves):
    """The second half as a program: what `refs` begin with, and what is in them in the end."""

    def backward(constants, kept, dy, sums):
        refs = [jax.new_ref(total) for total in sums]
        gradients = halves.pullback(constants, jnp.full(X.shape, jnp.nan), kept, refs)(dy)
        return gradients, [ref[...] for ref in refs]

    return backward


def shapes_of_backward(halves):
    y, kept = jax.eval_shape(halves.forward, _shapes(CONSTANTS), X)
    return _shapes(CONSTANTS), kept, y, SUMS


def with_rule(make, layer):
    """A rule for what comes out of a layer; nothing but the layer itself depends on its kernel."""
    return lambda x, *of: make(jnp.sin)(layer(x, *of))


def grown(x):
    return in_a_while_loop(lambda x: 1.5 * x)(x)


def on_shards(function):
    """Rows are split, and gradients of what all devices have are summed."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",))
    return jax.shard_map(function, mesh=mesh, in_specs=(P("rows"), P(), P()), out_specs=P("rows"))


WRAPS = {
    "as it is": lambda layer: layer,
    "in a jit": lambda layer: jax.jit(layer, static_argnums=3),
    "recomputed": lambda layer: jax.checkpoint(layer, static_argnums=3),
    "in a scan": lambda layer: lambda x, *of: lax.scan(lambda x, _: (layer(x, *of), None), x, length=3)[0],
    "in a branch": lambda layer: lambda x, *of: lax.cond(x.sum() > 0, lambda x: layer(x, *of), lambda x: x + 1, x),
    "beside a while loop": lambda layer: lambda x, *of: layer(x, *of) * jnp.cos(grown(lax.stop_gradient(x))),
    "with a vjp": lambda layer: with_rule(with_a_vjp, layer),
    "with a jvp": lambda layer: with_rule(with_a_jvp, layer),
    "on shards": lambda layer: lambda *args: on_shards(lambda x, *of: layer(x, *of, args[3]))(*args[:3]),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_the_halves_are_the_vjp(wrap):
    """Also where jax traces a layer as a program of its own; x is NaN in the second half, which must not read it."""
    halves, x = of_plain(wrap), normal(20, X.shape)
    y, kept = jax.jit(halves.forward)(CONSTANTS, x)
    backward = needed(backward_of(halves), *shapes_of_backward(halves))
    gradients, _ = backward(CONSTANTS, kept, of_dy(y), ONES)

    @jax.jit
    def whole(constants, x):
        y, pull = jax.vjp(function([plain] * LAYERS, wrap), constants, x)
        return y, pull(of_dy(y))

    expected = whole(CONSTANTS, x)
    assert jax.tree.structure((y, gradients)) == jax.tree.structure(expected)
    for found, wanted in zip(jax.tree.leaves((y, gradients)), jax.tree.leaves(expected), strict=True):
        assert_same_bits(found, wanted)
    other = backward(CONSTANTS, jax.jit(halves.forward)(CONSTANTS, -x)[1], of_dy(y), ONES)[0]
    assert not np.array_equal(other[1], gradients[1])  # negative control: what was kept of another x


def leaves_of_vjp(halves):
    """What jax itself keeps, Refs aside."""
    refs = halves.make_refs()
    leaves = jax.tree.leaves(halves.pull_back(CONSTANTS, normal(20, X.shape), refs)[1])
    return [leaf for leaf in leaves if not isinstance(leaf, jax.Ref)]


@pytest.mark.parametrize("halves", [of_plain(WRAPS["as it is"]), of_refs()], ids=["plain", "refs"])
def test_only_what_depends_on_x_is_kept(halves):
    """No kernel, no rounded kernel; and x itself once."""
    _, kept = jax.jit(halves.forward)(CONSTANTS, normal(20, X.shape))
    assert {leaf.shape for leaf in kept} == {X.shape}
    assert sum(np.array_equal(leaf, normal(20, X.shape)) for leaf in kept) == 1
    assert len(kept) == len({np.asarray(leaf).tobytes() for leaf in kept})  # no two are the same
    assert (WIDTH, WIDTH) in {leaf.shape for leaf in leaves_of_vjp(halves)}  # negative control: jax keeps kernels


def dots(function, *args) -> int:
    return str(jax.make_jaxpr(function)(*args)).count("dot_general[")


def test_the_forward_is_dead_in_the_backward():
    """Each layer has two products, of the gradients of x and of the kernel, and no tanh."""
    halves = of_refs()
    shapes, run = shapes_of_backward(halves), backward_of(halves)
    program = needed(run, *shapes)
    assert dots(program, *shapes) == 2 * LAYERS and "tanh" not in str(jax.make_jaxpr(program)(*shapes))
    assert dots(run, *shapes) == 3 * LAYERS  # negative control
    assert dots(halves.forward, _shapes(CONSTANTS), X) == LAYERS
    lowered = jax.jit(program).lower(*shapes).as_text()
    assert len(re.findall(r"stablehlo\.dot_general", lowered)) == 2 * LAYERS and "stablehlo.tanh" not in lowered


def test_a_ref_is_written_once():
    """The backward adds to what is there; the forward, whose Refs are its own, to nothing."""
    halves, x = of_refs(), normal(20, X.shape)
    assert not re.search(r"Ref\{|<-", str(jax.make_jaxpr(halves.forward)(CONSTANTS, x)))
    y, kept = jax.jit(halves.forward)(CONSTANTS, x)
    backward = needed(backward_of(halves), *shapes_of_backward(halves))
    _, once = backward(CONSTANTS, kept, of_dy(y), ONES)
    _, twice = backward(CONSTANTS, kept, of_dy(y), once)
    _, pull = jax.vjp(function([plain] * LAYERS), CONSTANTS, x)
    for before, found, again, gradient in zip(ONES, once, twice, pull(of_dy(y))[0]["kernels"], strict=True):
        np.testing.assert_allclose(found - before, gradient, 0.01, 0.01)  # that of the plain one is rounded
        np.testing.assert_allclose(again - found, found - before, 1e-5, 1e-5)
        assert float(jnp.max(jnp.abs(gradient))) > 0.1


def test_a_program_has_what_its_results_need():
    """Among it are writes to a Ref that is read later, in their order; not those to one that nobody reads."""
    table = np.arange(3.0, dtype=np.float32)

    def run(given, scale):
        wanted, unwanted = jax.new_ref(given["x"]), jax.new_ref(given["x"])
        wanted[...] *= scale
        unwanted[...] = given["x"] @ given["x"]
        wanted[...] += table
        return {"sum": wanted[...], "one": 1.0, "same": given["x"], "none": None}, [jnp.sin(scale)]

    x = normal(0, (3, 3))
    shapes = _shapes({"x": x}), jax.ShapeDtypeStruct((), jnp.float32)
    program = needed(run, *shapes)
    found, expected = program({"x": x}, jnp.float32(2)), run({"x": x}, jnp.float32(2))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(found[0]["sum"], 2 * x + table)
    text, whole = str(jax.make_jaxpr(program)(*shapes)), str(jax.make_jaxpr(run)(*shapes))
    assert (text.count("dot_general["), whole.count("dot_general[")) == (0, 1)
