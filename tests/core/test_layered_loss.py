"""A loss by its layers: what each piece sees of the variables, in which order, and when the whole is taken instead."""

import jax
import jax.numpy as jnp
import pytest

from jax_fp8.core.layered_loss import LayeredLoss, LayersByKind, WholeBatchLoss, of_layer

LAYERS = ("layer_0", "layer_1", "layer_2")
VARIABLES = {
    "params": {name: jnp.float32(2 + number) for number, name in enumerate(LAYERS)} | {"embedding": jnp.float32(7)},
    "fp8": {"layer_1": jnp.float32(11), "head": jnp.float32(13)},
}


@pytest.fixture
def calls():
    return []


@pytest.fixture
def pieces(calls):
    def layer(variables, x, name):
        calls.append((name, variables))
        return variables["params"][name] * x + variables.get("fp8", {}).get(name, 0)

    return {
        "layers": LAYERS,
        "first": lambda variables, batch: (
            calls.append(("first", variables)) or variables["params"]["embedding"] * batch
        ),
        "layer": layer,
        "last": lambda variables, x, batch: calls.append(("last", variables)) or x + variables["fp8"]["head"] * batch,
    }


def test_the_pieces_in_order_are_the_loss(pieces, calls):
    assert float(LayeredLoss(**pieces)(VARIABLES, 3)) == ((7 * 3 * 2) * 3 + 11) * 4 + 13 * 3
    assert [name for name, _ in calls] == ["first", *LAYERS, "last"]
    backwards = LayeredLoss(**pieces | {"layers": LAYERS[::-1]})
    assert float(backwards(VARIABLES, 3)) != ((7 * 3 * 2) * 3 + 11) * 4 + 13 * 3  # negative control


def test_a_layer_sees_its_own_variables_and_the_others_see_all(pieces, calls):
    LayeredLoss(**pieces)(VARIABLES, 3)
    seen = dict(calls)
    assert seen["first"] is VARIABLES and seen["last"] is VARIABLES
    assert seen["layer_0"] == {"params": {"layer_0": 2}}  # it has none in "fp8"
    assert seen["layer_1"] == {"params": {"layer_1": 3}, "fp8": {"layer_1": 11}}


def test_the_whole_is_taken_where_there_is_one(pieces, calls):
    loss = LayeredLoss(**pieces, whole=lambda variables, batch: variables["params"]["embedding"] - batch)
    assert float(loss(VARIABLES, 3)) == 4 and not calls


def test_it_is_a_function_like_others(pieces):
    """It can be traced and differentiated."""
    gradients = jax.jit(jax.grad(LayeredLoss(**pieces)))(VARIABLES, 3.0)
    assert gradients["params"] == {"embedding": 3 * 2 * 3 * 4, "layer_0": 21 * 3 * 4, "layer_1": 42 * 4, "layer_2": 137}


def test_variables_of_one_layer():
    assert of_layer(VARIABLES, "layer_1") == {"params": {"layer_1": 3}, "fp8": {"layer_1": 11}}
    assert of_layer(VARIABLES, "layer_2") == {"params": {"layer_2": 4}}
    assert of_layer(VARIABLES, "layer_3") == {}


def test_a_loss_of_whole_batches_is_a_function_that_says_so():
    loss = WholeBatchLoss(lambda variables, batch, scale=1: scale * (variables + batch), lambda batch: 10 * batch)
    assert loss(1, 2) == 3 and loss(1, 2, scale=4) == 12 and loss.whole_batch(2) == 20
    assert LayeredLoss((), abs, abs, abs).whole_batch is None


def test_only_layers_by_kind_say_which_compute_the_same(pieces, calls):
    layer = LayersByKind(pieces["layer"], lambda name: name == "layer_1")
    loss = LayeredLoss(**pieces | {"layer": layer})
    assert [loss.kind_of(name) for name in LAYERS] == [False, True, False]
    assert float(loss(VARIABLES, 3)) == float(LayeredLoss(**pieces)(VARIABLES, 3))
    assert [LayeredLoss(**pieces).kind_of(name) for name in LAYERS] == [*LAYERS]
