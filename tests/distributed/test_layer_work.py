"""Layers that are said to compute the same are traced once, under their own names; others are traced one by one."""

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hybrid import BATCH, SEQ, SHOWING, gpt, gradients_of, make_mesh, tokens, train
from pipelines import DELAYED, assert_same_gradients, dense, layers, loss_of, rows, variables_of
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.core.layered_loss import LayeredLoss, LayersByKind
from jax_fp8.jaxprs.equations import all_equations
from jax_fp8.train.step import TrainStep

PARTS = layers(DELAYED, 4)


def of_one_kind(loss: LayeredLoss) -> LayeredLoss:
    return replace(loss, layer=LayersByKind(loss.layer, lambda name: "a layer"))


def counting(loss: LayeredLoss, calls: list[str]) -> LayeredLoss:
    """Which notes the names of the layers that are called."""

    def apply(variables, x, name):
        calls.append(name)
        return loss.layer(variables, x, name)

    kinds = loss.layer
    return replace(loss, layer=LayersByKind(apply, kinds.kind_of) if isinstance(kinds, LayersByKind) else apply)


def step_of(loss: LayeredLoss, schedule: str, pipe: int = 2) -> TrainStep:
    parallel = fp8.Parallelism(make_mesh(pipe=pipe), schedule=schedule)
    return fp8.make_train_step(loss, SHOWING, DELAYED, 4, parallel=parallel)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_a_layer_of_a_gpt_is_traced_four_times_whatever_the_depth(schedule):
    """For its kind, on shards, for its forward and for its backward; of 24 layers on a mesh and in a step."""
    model, calls = gpt(DELAYED, num_layers=24), []
    step = step_of(counting(fp8.next_token_loss(model), calls), schedule)
    batch = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32)
    step.trace(step.state_shapes(model.init, jax.random.key(0), tokens()[:, :-1]), batch)
    assert calls == ["layer_0"] * 4


def test_layers_of_unknown_kinds_are_traced_one_by_one():
    """Negative control: all for their kinds, one on shards, those of a stage for the forward and for the backward."""
    calls: list[str] = []
    state = fp8.TrainState.create(variables=variables_of(PARTS), tx=SHOWING)
    step_of(counting(loss_of(PARTS), calls), "1f1b").trace(state, rows())
    assert calls == [*PARTS, "layer_0", "layer_0", "layer_1", "layer_1", "layer_0"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_a_shared_trace_has_the_bits_of_a_trace_of_each(schedule):
    state, batch = fp8.TrainState.create(variables=variables_of(PARTS), tx=SHOWING), rows()
    options = {"axes": {"pipe": 2}, "microbatches": 4, "schedule": schedule, "steps": 1}
    (shared, losses), (each, wanted) = (
        train(loss, state, batch, DELAYED, **options) for loss in (of_one_kind(loss_of(PARTS)), loss_of(PARTS))
    )
    assert losses == wanted
    jax.tree.map(assert_same_bits, shared, each)


def scopes(loss: LayeredLoss) -> Counter:
    """How many equations of a step have each scope."""
    state = fp8.TrainState.create(variables=variables_of(PARTS), tx=SHOWING)
    program = step_of(loss, "zero-bubble").trace(state, rows()).jaxpr
    return Counter(str(equation.source_info.name_stack) for equation, _ in all_equations(program.jaxpr))


def test_operations_have_the_names_of_their_own_layers():
    """Also those of a layer that was not traced itself."""
    shared = scopes(of_one_kind(loss_of(PARTS)))
    assert shared == scopes(loss_of(PARTS))
    of_layers = [sum(count for scope, count in shared.items() if name in scope.split("/")) for name in PARTS]
    assert of_layers[0] == of_layers[1] > 0 == of_layers[2]  # all stages have the names of the first


def test_layers_that_differ_in_the_backward_alone_keep_their_own():
    """Their jaxprs are equal, for the backward of a `jax.custom_vjp` is not traced with its forward."""

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def scaled_backward(factor, x):
        return x

    scaled_backward.defvjp(lambda factor, x: (x, None), lambda factor, _, dy: (factor * dy,))
    parts = PARTS | {"last": dense(DELAYED)}
    loss, names = loss_of(parts), [*PARTS]

    def layer(variables, x, name):
        return scaled_backward(1.0 + names.index(name) % 2, loss.layer(variables, x, name))

    by_turns = replace(loss, layer=layer)
    state, batch = fp8.TrainState.create(variables=variables_of(parts), tx=SHOWING), rows()

    def gradients(loss, **axes):
        return gradients_of(train(loss, state, batch, DELAYED, axes=axes or None, microbatches=4)[0][0])

    wanted = gradients(by_turns)
    assert_same_gradients(gradients(by_turns, pipe=2), wanted)
    with pytest.raises(AssertionError):  # negative control
        assert_same_gradients(gradients(of_one_kind(by_turns), pipe=2), wanted)
