"""Products under `vmap`, and the `dot_general` of Haliax's layers in FP8, with a stand-in for Haliax.

tests/hosts/haliax_check.py has the real one.
"""

import dataclasses
import functools
import re
import sys
import warnings
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from integrations.test_equinox import Module, field

import jax_fp8 as fp8
from jax_fp8.integrations import haliax
from jax_fp8.ops import carried_state

pytestmark = pytest.mark.versions

RECIPE = fp8.DelayedScaling(amax_history_len=4)
X = jax.random.normal(jax.random.key(1), (4, 16, 32))
KERNEL = jax.random.normal(jax.random.key(0), (32, 48)) / 4
STATE = haliax.CarriedState.first(RECIPE, KERNEL)
VECTOR, MATRIX = (((0,), (0,)), ((), ())), (((1,), (0,)), ((), ()))


def run(multiply, x, kernel, state):
    return jnp.mean(jnp.sin(multiply(x, kernel, state)))


def whole(x, kernel, state):
    leaves = None if state is None else {"scale": state.scale, "amax_history": state.amax_history}
    recipe = fp8.CurrentScaling() if state is None else RECIPE
    return fp8.dot_general(x, kernel, (((2,), (0,)), ((), ())), recipe=recipe, state=leaves)


def one(x, kernel, state, numbers=VECTOR):
    return haliax.product("up", fp8.CurrentScaling() if state is None else RECIPE, x, kernel, numbers, state)


def by_example(x, kernel, state, function=one):
    return jax.vmap(jax.vmap(lambda x: function(x, kernel, state)))(x)


def of_scan(x, kernel, state):
    return jax.lax.scan(lambda x, each: (x, one(x, *each)), x, jax.tree.map(lambda leaf: leaf[None], (kernel, state)))[
        1
    ][0]


WAYS = {
    "twice": by_example,
    "one dim": lambda x, kernel, state: jax.vmap(lambda x: one(x, kernel, state, MATRIX), 1, 1)(x),
    "jit": functools.partial(by_example, function=jax.jit(one)),
    "remat": functools.partial(by_example, function=jax.checkpoint(one)),
    "remat around": jax.checkpoint(by_example),
    "scan": functools.partial(by_example, function=of_scan),
    "without": lambda x, kernel, state: one(x, kernel, state, (((2,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("state", [STATE, None], ids=["delayed", "current"])
@pytest.mark.parametrize("way", WAYS)
def test_examples_are_rows_of_one_product(way, state):
    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(run, multiply), (0, 1, 2)))(X, KERNEL, state)
        for multiply in (WAYS[way], whole)
    )
    if state is not None:
        assert found[1][2].passes == 1
        found, expected = (
            (value, (*grads[:2], grads[2].scale, grads[2].amax_history)) for value, grads in (found, expected)
        )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9), found, expected)


def test_the_program_is_that_of_whole_batches(with_kernels):
    """Not one custom call for each example, nor a loop over them."""

    def calls(multiply):
        gradient = jax.jit(jax.grad(functools.partial(run, multiply), (1, 2)))
        text = gradient.trace(X, KERNEL, STATE).lower(lowering_platforms=("cuda",)).as_text()
        return re.findall(r"custom_call @(jax_fp8_\w+)|(stablehlo\.while)", text)

    assert calls(by_example) == calls(whole) and len(calls(whole)) == 6
    assert calls(functools.partial(by_loop)) != calls(whole)


def by_loop(x, kernel, state):
    """A control: one product for each of some examples."""
    return jax.lax.map(lambda x: one(x, kernel, state, MATRIX), x)


def test_kernels_and_states_of_their_own_are_products_of_their_own():
    kernels = jnp.stack([KERNEL, 2 * KERNEL, KERNEL, 3 * KERNEL])
    states = jax.vmap(functools.partial(haliax.CarriedState.first, RECIPE))(kernels)
    states = dataclasses.replace(states, scale=states.scale.at[:, 2].set(2.0**-8))  # none saturates

    def multiply(x, kernels, states):
        return jax.vmap(lambda x, kernel, state: one(x, kernel, state, MATRIX))(x, kernels, states)

    found, _ = jax.grad(functools.partial(run, multiply), (1, 2))(X, kernels, states)
    for number, kernel in enumerate(kernels):
        own = jax.grad(functools.partial(run, whole), (1, 2))
        gradient, _ = own(X[number][None], kernel, jax.tree.map(lambda leaf: leaf[number], states))  # noqa: B023
        np.testing.assert_allclose(found[number], gradient / len(kernels), rtol=1e-5, atol=2e-7)


def test_a_step_that_does_not_carry_the_state_warns():
    carried_state._warn_not_carried.cache_clear()
    with pytest.warns(UserWarning, match="differentiated, but not by its state"):
        jax.grad(functools.partial(run, by_example), 1)(X, KERNEL, STATE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        carried_state._warn_not_carried.cache_clear()
        jax.grad(functools.partial(run, by_example), (1, 2))(X, KERNEL, STATE)


# ---- layers ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Axis:
    name: str
    size: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NamedArray:
    array: jax.Array
    axes: tuple = dataclasses.field(metadata={"static": True})

    @property
    def ndim(self):
        return len(self.axes)


class Linear(Module):
    weight: NamedArray
    In: Axis = field(static=True)
    Out: Axis | tuple = field(static=True)
    dot_general: object = None


class Stacked(Module):
    stacked: Module
    Block: Axis = field(static=True)


class Norm(Module):
    weight: NamedArray


class Embedding(Norm):
    pass


class Block(Module):
    up: Linear
    norm: Norm


class OverwriteWithGradient(Module):
    pass


def vmap(function, axis):
    return lambda named: jax.vmap(
        lambda array: function(NamedArray(array, tuple(each for each in named.axes if each != axis)))
    )(named.array)


@pytest.fixture
def host(monkeypatch):
    modules = {name: ModuleType(name) for name in ("equinox", "haliax", "haliax.nn", "haliax.quantization")}
    modules["equinox"].Module, modules["equinox"].field = Module, field
    modules["haliax"].vmap = vmap
    modules["haliax.nn"].Linear, modules["haliax.nn"].Stacked = Linear, Stacked
    modules["haliax.quantization"].OverwriteWithGradient = OverwriteWithGradient
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    haliax._op_types.cache_clear()
    yield
    haliax._op_types.cache_clear()


IN, OUT, HEADS, LAYER = Axis("in", 32), Axis("out", 16), Axis("heads", 3), Axis("layer", 2)


def weight(*axes):
    return NamedArray(jax.random.normal(jax.random.key(len(axes)), [axis.size for axis in axes]), axes)


def make():
    up = Linear(weight(LAYER, HEADS, OUT, IN), IN, (HEADS, OUT))
    odd = Linear(weight(IN, Axis("odd", 10)), IN, Axis("odd", 10))
    return {
        "layers": Stacked(Block(up, Norm(weight(LAYER, IN))), LAYER),
        "embedding": Embedding(weight(OUT, IN)),
        "head": Linear(weight(IN, OUT), IN, OUT),
        "odd": odd,
    }


def test_layers_get_an_op_and_the_others_are_listed(host):
    model, listing = haliax.in_fp8(make(), RECIPE)
    assert listing.in_fp8 == ("head", "layers.stacked.up")
    assert listing.left == {"odd": "10 columns are no multiple of 16", "embedding": "Embedding without FP8"}
    op = model["layers"].stacked.up.dot_general
    assert isinstance(op, OverwriteWithGradient) and op.kernel_shape == (3, 16, 32)
    largest = jnp.max(jnp.abs(model["layers"].stacked.up.weight.array), (1, 2, 3))
    np.testing.assert_allclose(op.state.scale[:, 1], largest / 448, rtol=1e-6)
    assert op.state.amax_history.shape == (2, 3, 4)
    stateless, _ = haliax.in_fp8(make(), fp8.CurrentScaling(), ["up"])
    assert not jax.tree.leaves(stateless["layers"].stacked.up.dot_general) and stateless["head"].dot_general is None


@pytest.mark.parametrize(("asked", "dtype"), [(None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)])
def test_the_op_finds_the_kernel_in_swapped_operands(host, asked, dtype):
    """jax's einsum swaps operands where that spares a transposition. The rows of the state stay in their order."""
    x, kernel = jax.random.normal(jax.random.key(0), (2, 16, 32)), jax.random.normal(jax.random.key(1), (2, 32, 48))
    op = haliax.dot_general_op(RECIPE, kernel, asked)
    numbers = ((2,), (1,)), ((0,), (0,))
    swapped = ((1,), (2,)), ((0,), (0,))

    def loss(op, is_swapped):
        y = op(kernel, x, swapped) if is_swapped else op(x, kernel, numbers, None, jnp.float32)
        return jnp.mean(jnp.sin(y.astype(jnp.float32)))

    assert op(x, kernel, numbers).dtype == dtype
    np.testing.assert_array_equal(op(kernel, x, swapped), jnp.swapaxes(op(x, kernel, numbers), 1, 2))
    new, of_swapped = (jax.grad(loss)(op, is_swapped).state for is_swapped in (False, True))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), of_swapped, new)
    expected = [jnp.max(jnp.abs(each.astype(dtype))) for each in (x, kernel)]
    np.testing.assert_array_equal(new.amax_history[:2, -1], [float(each) for each in expected])


def test_what_is_refused(host):
    with pytest.raises(ValueError, match="dot_general_op needs a recipe, got None; leave the model as it is"):
        haliax.dot_general_op(None)
    with pytest.raises(ValueError, match="where must be a regular expression, last names of layers, or a function"):
        haliax.in_fp8(make(), RECIPE, 3)
    op = haliax.in_fp8(make(), RECIPE)[0]["head"].dot_general
    with pytest.raises(ValueError, match=r"head: the weight gradient contracts over .* multiple of 16, got 3"):
        jax.grad(lambda op: jnp.sum(op(X[0, :3], KERNEL[:, :16], MATRIX)))(op)


def test_without_the_host():
    haliax._op_types.cache_clear()
    with pytest.raises(ImportError, match="this function needs haliax, which is not installed; pip install haliax"):
        haliax.in_fp8({}, RECIPE)
    with pytest.raises(ImportError, match="pip install haliax"):
        haliax.dot_general_op(RECIPE)
