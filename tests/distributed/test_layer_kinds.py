"""What the pieces of a loss say is what the whole loss says; layers that compute the same are of one kind."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import pytest
from hybrid import gpt, tokens
from pipelines import CURRENT, DELAYED, Tanh, dense, layers, loss_of, rows, variables_of

import jax_fp8 as fp8
from jax_fp8.distributed.layer_kinds import LayerKinds
from jax_fp8.grads.loss_trace import LossTrace

NAMES = [f"layer_{number}" for number in range(4)]
PARTS = {"first": dense(CURRENT)} | layers(DELAYED, 4) | {"last": dense(DELAYED)}


def by_name(scale_of: Callable[[str], float]) -> fp8.LayeredLoss:
    """Layers whose result is multiplied by a number."""
    loss = loss_of(PARTS)
    return fp8.LayeredLoss(
        loss.layers, loss.first, lambda variables, x, name: scale_of(name) * loss.layer(variables, x, name), loss.last
    )


def pieces_of(loss, parts=PARTS) -> LayerKinds:
    return LayerKinds.from_loss(loss, variables_of(parts), rows(16))


def test_what_pieces_say_is_what_the_loss_says():
    """Of a GPT, whose layers declare how their params may be split; also in which order."""
    model = gpt(DELAYED, num_layers=3, head_recipe=CURRENT)
    batch = tokens()
    variables = jax.eval_shape(model.init, jax.random.key(0), batch[:, :-1])
    loss = fp8.next_token_loss(model)
    pieces, whole = LayerKinds.from_loss(loss, variables, batch), LossTrace.from_function(loss, variables, batch)
    assert pieces.trace == whole and list(pieces.trace.gemms) == list(whole.gemms)
    assert any(sharding.columns_of for sharding in whole.declared.values()) and len(whole.gemms) == 3 * 4
    assert set(pieces.kinds.values()) == {"layer_0"}
    short = LossTrace.from_function(
        pieces.short_loss, {key: pieces.short(tree) for key, tree in variables.items()}, batch
    )
    assert pieces.of_all(short.gemms) == whole.gemms and len(short.gemms) == 4


def of_unlike(**fields) -> LayerKinds:
    """Whose layer_1 is another one."""
    parts = PARTS | {"layer_1": partial(Tanh, **{"recipe": DELAYED} | fields)}
    return pieces_of(loss_of(parts), parts)


KINDS = {
    "as they are": (lambda: pieces_of(loss_of(PARTS)), [0, 0, 0, 0]),
    "by turns": (lambda: pieces_of(by_name(lambda name: 1.0 + NAMES.index(name) % 2)), [0, 1, 0, 1]),
    "one of its own": (lambda: pieces_of(by_name(lambda name: 2.0 if name == "layer_2" else 1.0)), [0, 0, 2, 0]),
    # Forwards are the same: only what it says of its recipe differs.
    "another recipe": (lambda: of_unlike(recipe=replace(DELAYED, split_accumulator=())), [0, 1, 0, 0]),
    "another width": (lambda: of_unlike(hidden=64), [0, 1, 0, 0]),
}


@pytest.mark.parametrize("case", KINDS)
def test_kinds_of_layers(case):
    make, first = KINDS[case]
    pieces = make()
    assert pieces.kinds == {name: NAMES[number] for name, number in zip(NAMES, first, strict=True)}
    kept = [NAMES[number] for number in sorted({*first})]
    assert list(pieces.short_loss.layers) == kept
    assert list(pieces.short(variables_of(PARTS)["params"])) == ["first", *kept, "last"]
    gemms = pieces.trace.gemms
    assert (
        pieces.of_all({gemm: recipe for gemm, recipe in gemms.items() if gemm[0] in (*kept, "first", "last")}) == gemms
    )


def test_the_short_loss_has_the_loss_of_its_layers():
    pieces, variables = pieces_of(loss_of(PARTS)), variables_of(PARTS)
    short = {key: pieces.short(tree) for key, tree in variables.items()}
    of_one = loss_of({name: make for name, make in PARTS.items() if name not in NAMES[1:]})
    assert pieces.short_loss(short, rows(16)) == of_one(short, rows(16)) != loss_of(PARTS)(variables, rows(16))
