"""Layers differentiated one by one: the same gradients as of the whole, and what leaves for the host or comes back from
there has its place in the order of the program.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal
from reference import assert_same_bits

from jax_fp8.core.checkpoint_names import name_residual, offload_policy
from jax_fp8.core.layered_loss import LayeredLoss
from jax_fp8.grads.by_layer import ByLayer, comes_back_beside
from jax_fp8.grads.gradients import take_gradients

pytestmark = pytest.mark.versions

HOST = jax.memory.Space.Host
LAYERS = tuple(f"layer_{index}" for index in range(6))
ON_HOST = LAYERS[0:4:3]  # every third, as of `offload:2`
X = jnp.linspace(-1, 1, 8)
PARAMS = {name: {"w": jnp.linspace(1, 2 + index, 8)} for index, name in enumerate(LAYERS)}
VARIABLES = {"params": PARAMS | {"table": X + 2, "head": X**2}}


@jax.custom_vjp
def scaled(w, x):
    return jnp.sin(w * x)


def scaled_forward(w, x):
    hidden = name_residual("mlp_hidden", w * x)
    return jnp.sin(hidden), (w, x, hidden)


def scaled_backward(kept, dy):
    w, x, hidden = kept
    return jnp.sqrt(x * x) * jnp.sign(x) * (dy * jnp.cos(hidden)), w * (dy * jnp.cos(hidden))  # one root in each


scaled.defvjp(scaled_forward, scaled_backward)


def layer(variables, x, name):
    own = jax.checkpoint(scaled, policy=offload_policy(), prevent_cse=False) if name in ON_HOST else scaled
    return own(variables["params"][name]["w"], x)


def loss_of(on_host):
    return LayeredLoss(
        LAYERS,
        lambda variables, batch: variables["params"]["table"] * batch,
        layer,
        lambda variables, x, _: jnp.sum(variables["params"]["table"] * x * variables["params"]["head"]),
        on_host=on_host,
    )


class Order:
    """A traced gradient, and what of it must wait for what."""

    def __init__(self, on_host):
        def run(variables, batch):
            found = take_gradients(loss_of(on_host))(variables, batch)
            return found.loss, found.grads

        jaxpr = jax.make_jaxpr(run)(VARIABLES, X).jaxpr
        self.before = {}  # each variable: all variables that must be there first
        self.made_by = {"sin": [], "sqrt": [], "device_put": []}
        self.came_back, self.loss = [], jaxpr.outvars[0]
        for equation in jaxpr.eqns:
            before = {var for var in equation.invars if not isinstance(var, Literal)}
            if equation.primitive.name == "remat2":  # the backward of a layer that is offloaded
                self.came_back += [var for var in before if getattr(var.aval, "memory_space", None) == HOST]
            before |= {earlier for var in before for earlier in self.before.get(var, ())}
            for var in equation.outvars:
                self.before[var] = before
            self.made_by.get(equation.primitive.name, []).append(equation.outvars[0])

    def waits(self, later, earlier) -> bool:
        return earlier in self.before[later]


def test_gradients_are_those_of_the_whole():
    """Also of a param that is read before the layers and after them."""
    whole, by_layer = (jax.jit(take_gradients(loss_of(on_host))) for on_host in ((), ON_HOST))
    expected, actual = (run(VARIABLES, X) for run in (whole, by_layer))
    jax.tree.map(assert_same_bits, actual, expected)
    assert jnp.any(expected.grads["table"] != 0) and [*actual.grads] == [*expected.grads]


def test_what_is_kept_has_left_before_the_next_layer_that_is_offloaded_begins():
    order = Order(ON_HOST)
    first, second = order.made_by["device_put"]
    results = order.made_by["sin"]
    assert [order.waits(y, first) for y in results] == [False, False, False, True, True, True]
    assert not any(order.waits(y, second) for y in results) and order.waits(order.loss, second)


def test_what_comes_back_waits_for_the_gradients_of_layers_above():
    """All but that of the one right above, beside whose backward it comes back."""
    order = Order(ON_HOST)
    of_3, of_0 = order.came_back
    of_layers = dict(zip((5, 4, 2, 1), order.made_by["sqrt"], strict=True))
    assert {number for number, root in of_layers.items() if order.waits(of_3, root)} == {5}
    assert {number for number, root in of_layers.items() if order.waits(of_0, root)} == {5, 4, 2}


def test_as_a_whole_nothing_waits():
    """Negative control: as jax differentiates it, copies may be put off, and come back at any time."""
    order = Order(())
    assert len(order.made_by["device_put"]) == len(order.came_back) == 2
    later = [*order.made_by["sin"], order.loss]
    assert not any(order.waits(y, left) for y in later for left in order.made_by["device_put"])
    assert not any(order.waits(back, root) for back in order.came_back for root in order.made_by["sqrt"])


def test_sums_that_gemms_add_to_are_waited_for_too():
    """Refs of them, which hold what they held."""
    sums = {("layer_5", "w"): X + 5, ("layer_2", "w"): X + 2, ("layer_0", "w"): X}

    def run(sums):
        refs = {path: jax.new_ref(total) for path, total in sums.items()}
        by_layer = ByLayer(loss_of(ON_HOST), VARIABLES, lambda rows: None, refs)
        value, (gradients, _) = by_layer.value_and_grads(jnp.zeros(0), X)
        return value, gradients, {path: ref[...] for path, ref in refs.items()}

    _, gradients, after = jax.jit(run)(sums)
    jax.tree.map(assert_same_bits, after, sums)
    expected = take_gradients(loss_of(()))(VARIABLES, X).grads
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), gradients, expected)
    barriers = [equation for equation in jax.make_jaxpr(run)(sums).eqns if "barrier" in equation.primitive.name]
    # x and what is away; then dx, with the gradient of the layer above or what is away
    assert [len(equation.invars) for equation in barriers] == [2, 2, *(1, 2, 2, 2, 2, 2, 2, 2)]


@pytest.mark.parametrize(
    ("on_host", "beside"),
    [
        ((), [[], [], [], [], [], []]),
        (("layer_0", "layer_3"), [[], ["layer_0"], [], [], ["layer_3"], []]),
        (("layer_0",), [[], [], [], ["layer_0"], [], []]),
        (("layer_1", "layer_4", "layer_5"), [[], [], ["layer_1"], [], [], ["layer_5", "layer_4"]]),
    ],
)
def test_what_comes_back_has_half_of_the_layers_between(on_host, beside):
    assert comes_back_beside(loss_of(on_host)) == beside


@pytest.mark.parametrize("last", [lambda *_: X, lambda *_: jnp.int32(3)])
def test_a_loss_that_is_no_scalar_is_refused(last):
    loss = dataclasses.replace(loss_of(ON_HOST), last=last)
    with pytest.raises(ValueError, match="loss_fn must return a floating point scalar"):
        take_gradients(loss)(VARIABLES, X)
