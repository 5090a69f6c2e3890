"""What a pipeline refuses, each in one sentence."""

import dataclasses
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
import optax
import pytest
from hybrid import make_mesh, spread
from pipelines import CURRENT, DELAYED, Tanh, dense, layers, loss_of, rows, variables_of

import jax_fp8 as fp8

PARTS = layers(DELAYED)
BATCH = rows()
TX = optax.sgd(0.1)


def state_of(parts) -> fp8.TrainState:
    return fp8.TrainState.create(variables=variables_of(parts), tx=TX)


def make(parts=PARTS, microbatches=4, loss=None, pipe=2, **options):
    loss = loss_of(parts) if loss is None else loss
    return fp8.make_train_step(loss, TX, DELAYED, microbatches, **spread(make_mesh(pipe=pipe), **options))


def trace(parts=PARTS, state=None, **options):
    return make(parts, **options).trace(state_of(parts) if state is None else state, BATCH)


def with_collections() -> fp8.TrainState:
    return state_of(PARTS).replace(collections={"batch_stats": {"mean": jnp.zeros(2)}})


def with_cache() -> fp8.TrainState:
    variables = variables_of(PARTS)
    return fp8.TrainState.create(variables=variables | {"fp8_cache": fp8.cast_weights(variables, DELAYED)}, tx=TX)


def unlike(**fields):
    return layers(DELAYED) | {"layer_1": partial(Tanh, **{"recipe": DELAYED} | fields)}


def of_other_names() -> fp8.LayeredLoss:
    loss = loss_of(PARTS)
    return fp8.LayeredLoss(("layer_0", "layer_2"), loss.first, loss.layer, loss.last, lambda *given: loss(*given))


def returning_a_pair(parts) -> fp8.LayeredLoss:
    loss = loss_of(parts)
    return dataclasses.replace(loss, last=lambda *given: (loss.last(*given), {}))


def by_number(parts, number_of) -> fp8.LayeredLoss:
    """Layers whose result is multiplied by a number."""
    loss = loss_of(parts)

    def layer(variables, x, name):
        return loss.layer(variables, x, name) * number_of(loss.layers.index(name))

    return fp8.LayeredLoss(loss.layers, loss.first, layer, loss.last)


def twice(parts) -> fp8.LayeredLoss:
    loss = loss_of(parts)
    return fp8.LayeredLoss(("layer_0", "layer_0"), loss.first, loss.layer, loss.last)


class Stacked(nn.Module):
    """Two layers in one."""

    @nn.compact
    def __call__(self, x):
        axes, rngs = dict.fromkeys(("params", "fp8", "fp8_cache"), 0), {"params": True}
        both = nn.scan(InScan, variable_axes=axes, split_rngs=rngs, length=2)
        return both(DELAYED, name="inner")(x, None)[0]


class InScan(Tanh):
    def __call__(self, x, _):
        return super().__call__(x), None


class Widens(Tanh):
    """What it returns has another dtype than what it takes."""

    def __call__(self, x):
        return super().__call__(x).astype(jnp.float32)


REMAT = layers(DELAYED, remat=True)
REFUSED = {
    "a loss without layers": (
        lambda: make(loss=lambda variables, batch: 0.0),
        r"a pipeline needs the layers of a loss, a LayeredLoss as next_token_loss\(GPT\(...\)\) returns it, got .*; ma",
    ),
    "layers that stages do not divide": (
        lambda: make(layers(DELAYED, 3)),
        "got 3 layers for 2 stages with 1 chunks each; pass a multiple of 2 layers, or other stages",
    ),
    "layers that chunks do not divide": (
        lambda: make(schedule="interleaved"),
        "got 2 layers for 2 stages with 2 chunks each; pass a multiple of 4 layers, or other stages",
    ),
    "fewer microbatches than stages": (
        lambda: make(microbatches=1),
        "as many microbatches as stages, or more, got 1 microbatches for 2 stages; pass at least 2",
    ),
    "groups that are not whole": (
        lambda: make(layers(DELAYED, 4), microbatches=3, schedule="interleaved"),
        "as many microbatches as stages, or a multiple, got 3 microbatches for 2 stages; pass 4",
    ),
    "an unknown schedule": (
        lambda: make(schedule="2f2b"),
        "must be one of gpipe, 1f1b, interleaved, zero-bubble, got '2f2b'; choose one",
    ),
    "chunks with a schedule of one": (
        lambda: make(layers(DELAYED, 4), chunks=2),
        "1f1b has one chunk of layers on each stage, got chunks=2; leave it out, or take interleaved",
    ),
    "weights cast in every microbatch": (
        lambda: make(cache_weights=False),
        "casts its weights once a step, got cache_weights=False; leave it out, or the axis pipe",
    ),
    "aux": (lambda: make(has_aux=True), "in pieces, which return no aux, got has_aux=True .*; leave out one of them"),
    "other collections": (
        lambda: trace(state=with_collections()),
        r"got a state with the collections \['batch_stats'\]; normalize without batch statistics, or leave out the ax",
    ),
    "a pair where the last piece returns a number": (
        lambda: trace(loss=returning_a_pair(PARTS)),
        "loss_fn must return a scalar, got a tuple; return the loss alone\n",
    ),
    "one layer without FP8": (
        lambda: trace(unlike(recipe=None)),
        "the layers of a pipeline must be alike, .* got layer_1 unlike layer_0; make them alike, or leave out",
    ),
    "one layer with another recipe": (lambda: trace(unlike(recipe=CURRENT)), "must be alike, .* got layer_1 unlike"),
    "one layer of another width": (lambda: trace(unlike(hidden=64)), "must be alike, .* got layer_1 unlike layer_0"),
    "names of no params": (
        lambda: trace(loss=of_other_names()),
        r"got 'layer_2' among \('layer_0', 'layer_2'\), and params of \['layer_0', 'layer_1'\]; name them as in the pa",
    ),
    "layers that change the dtype": (
        lambda: trace({name: partial(Widens, DELAYED) for name in PARTS}),
        r"must return what it takes, bfloat16 \(16, 32\), got float32 \(16, 32\); put what changes it before or after",
    ),
    "layers that compute by their number": (
        lambda: trace(loss=by_number(PARTS, lambda number: 1.0 + number)),
        "the same number on their stages must compute the same, got layer_1 unlike layer_0; let no layer compute by",
    ),
    "a layer that is there twice": (
        lambda: make(loss=twice(PARTS)),
        r"must be different ones, got 'layer_0' twice among \('layer_0', 'layer_0'\); give each its own params, or",
    ),
    "kernels that are stacked": (
        lambda: trace(dict.fromkeys(PARTS, Stacked)),
        "must have kernels of two dims, not stacked by nn.scan or nn.vmap, got layer_0/inner/up with 3 dims; let",
    ),
    "state before the layers": (
        lambda: trace({"first": dense(DELAYED)} | PARTS),
        "no GEMM there may have FP8 state, got first with delayed scaling; give it CurrentScaling",
    ),
    "operands that are hidden": (
        lambda: trace(REMAT, schedule="zero-bubble"),
        "which a layer's own jax.checkpoint or scan hides, got layer_0/down in one; take another schedule, or",
    ),
    "a state with a weight cache": (
        lambda: trace(state=with_cache()),
        "must have whole params on every device, got a step on pipe=2; leave fp8_cache out of the variables",
    ),
    "start": (
        lambda: make().start(state_of(PARTS)),
        "start runs whole models, and has no pipeline, got pipe=2; leave out the axis pipe, or call a step of make_",
    ),
    "accumulate_step": (
        lambda: make().accumulate_step(
            state_of(PARTS), fp8.make_train_step(loss_of(PARTS), TX, DELAYED, 4).start(state_of(PARTS)), BATCH,
            is_first_microbatch=True,
        ),
        "accumulate_step runs whole models, and has no pipeline, got pipe=2",
    ),
    "value_and_grad": (
        lambda: fp8.value_and_grad(loss_of(PARTS), parallel=make_mesh(pipe=2)),
        "value_and_grad runs whole models, and has no pipeline, got pipe=2",
    ),
    "warm_start": (
        lambda: fp8.warm_start(loss_of(PARTS), DELAYED, parallel=make_mesh(pipe=2, data=2)),
        "warm_start runs whole models, and has no pipeline, got pipe=2,data=2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as said:
        call()
    assert "\n" not in str(said.value) and str(said.value).count("; ") == 1


def test_what_is_like_the_refused_is_taken():
    """Negative control: a GEMM without state before the layers, hidden operands with another schedule, and layers that
    differ by turns, so that those with the same number on their stages do not.
    """
    trace({"first": dense(CURRENT)} | PARTS)
    trace(REMAT, schedule="1f1b")
    by_turns = layers(DELAYED, 4)
    trace(by_turns, loss=by_number(by_turns, lambda number: 1.0 + number % 2))
