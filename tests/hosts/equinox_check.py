"""Models of Equinox in FP8, with the real package: `make hosts` runs this on a CPU, in two minutes.

    python tests/hosts/equinox_check.py --output equinox_check.json

A small Transformer of Equinox's own layers, which sees one example and is called under `jax.vmap`, learns rows that
count by seven. Losses and states in FP8 are compared with those in float32, and with those of the same model on whole
batches by `dot_general`; with scan over stacked layers, `eqx.filter_checkpoint`, gradient accumulation, and after a
checkpoint was read. Ends with one line per group of checks, and with exit code 1 if a check failed.
"""

import io
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.report import Report, Script, run_script

import jax_fp8 as fp8
from jax_fp8.integrations import equinox as fp8_equinox
from jax_fp8.integrations.equinox import CarriedState, apply_updates, by_maximum, in_fp8, split

ROWS, SEQ, VOCAB, EMBED, LAYERS, STEPS = 8, 32, 160, 64, 2, 12
DELAYED = fp8.DelayedScaling(amax_history_len=8)
RECIPES = {"current": fp8.CurrentScaling(), "block": fp8.BlockScaling(), "delayed": DELAYED}
PROJECTIONS = tuple(f"attention.{name}_proj" for name in ("query", "key", "value", "output"))
PRODUCTS = (*PROJECTIONS, "mlp.layers.0", "mlp.layers.1")
CLOSE = 0.02  # of a loss, relative


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(EMBED)
        self.attention = eqx.nn.MultiheadAttention(4, EMBED, key=keys[0])
        self.mlp = eqx.nn.MLP(EMBED, EMBED, 2 * EMBED, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))


class Model(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list | Block
    head: eqx.nn.Linear
    odd: eqx.nn.Linear
    remat: bool = eqx.field(static=True)

    def __init__(self, key, stacked=False, remat=False):
        *keys, last = jax.random.split(key, LAYERS + 1)
        self.embedding = eqx.nn.Embedding(VOCAB, EMBED, key=last)
        self.blocks = eqx.filter_vmap(Block)(jnp.stack(keys)) if stacked else [Block(key) for key in keys]
        self.head = eqx.nn.Linear(EMBED, VOCAB, use_bias=False, key=last)
        self.odd, self.remat = eqx.nn.Linear(EMBED, 10, key=last), remat

    def __call__(self, tokens):
        def run(block, x):
            return block(x)

        run = eqx.filter_checkpoint(run) if self.remat else run
        x = jax.vmap(self.embedding)(tokens)
        if isinstance(self.blocks, Block):
            arrays, static = eqx.partition(self.blocks, eqx.is_array)
            x, _ = jax.lax.scan(lambda x, block: (run(eqx.combine(block, static), x), None), x, arrays)
        else:
            for block in self.blocks:
                x = run(block, x)
        return jax.vmap(self.head)(x)


def batches(steps=STEPS):
    starts = np.random.default_rng(0).integers(0, VOCAB, (steps, ROWS, 1))
    return jnp.asarray((starts + 7 * np.arange(SEQ + 1)) % VOCAB, jnp.int32)


def loss_fn(model, tokens):
    logits = jax.vmap(model)(tokens[:, :-1]).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def make(recipe=None, **options):
    model = Model(jax.random.key(0), **options)
    return model if recipe is None else in_fp8(model, recipe)[0]


def trainable(model):
    return split(eqx.filter(model, eqx.is_inexact_array))[1]


def train(model, data=None, accumulate=1, keep_states=True, loss_fn=loss_fn, opt_state=None):
    """The losses of a step as users write it, the model and the optimizer's state."""
    optimizer = optax.adamw(3e-3)
    opt_state = optimizer.init(trainable(model)) if opt_state is None else opt_state

    @eqx.filter_jit
    def step(model, opt_state, tokens):
        total, states, losses = None, None, []
        for part in jnp.split(tokens, accumulate):
            loss, grads = eqx.filter_value_and_grad(loss_fn)(model, part)
            new_states, grads = split(grads)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            states = new_states if states is None else jax.tree.map(jnp.maximum, states, new_states)
            losses.append(loss)
        total = jax.tree.map(lambda leaf: leaf / accumulate, total)
        updates, opt_state = optimizer.update(total, opt_state, trainable(model))
        return apply_updates(model, updates, states if keep_states else None), opt_state, sum(losses) / accumulate

    losses = []
    for tokens in batches() if data is None else data:
        model, opt_state, loss = step(model, opt_state, tokens)
        losses.append(float(loss))
    return losses, model, opt_state


def states_of(model):
    return [node for node in jax.tree.leaves(model, is_leaf=is_state) if is_state(node)]


def is_state(node):
    return isinstance(node, CarriedState)


def largest_difference(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.max(jnp.abs(a - b) / jnp.maximum(jnp.abs(b), 1e-12))) for a, b in pairs)


def check_layers(report: Report):
    for stacked in (False, True):
        model = Model(jax.random.key(0), stacked)
        converted, listing = in_fp8(model, DELAYED)
        names = PRODUCTS if stacked else tuple(f"{layer}.{name}" for layer in range(LAYERS) for name in PRODUCTS)
        wanted = {"head", *(f"blocks.{name}" for name in names)}
        report.expect("every linear layer", set(listing.in_fp8) == wanted, f"{listing}")
        left = {"odd": "10 columns are no multiple of 16", "embedding": "Embedding without FP8"}
        report.expect("the others are listed", listing.left == left, f"{listing}")
        weights = (jax.tree.leaves(trainable(each)) for each in (model, converted))
        same = [np.array_equal(a, b) for a, b in zip(*weights, strict=True)]
        report.expect("weights stay", all(same) and len(same) > 10, f"{same}")
        report.expect("weights stay", isinstance(converted.head, eqx.nn.Linear), "type")
        tokens = batches(1)[0][:, :-1]
        a, b = (eqx.filter_jit(eqx.filter_vmap(each))(tokens) for each in (model, converted))
        off = float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a))
        report.expect("logits", 0 < off < 0.15, f"off by {off:.3f}")


def check_training(report: Report):
    expected, _, _ = train(make())
    report.expect("learns", expected[-1] < 0.6 * expected[0], f"{expected}")
    for name, recipe in RECIPES.items():
        losses, model, _ = train(make(recipe))
        off = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
        report.worst[f"of a loss, {name}, relative"] = off
        report.expect(f"losses of {STEPS} steps", 0 < off < CLOSE, f"{name}: {losses} instead of {expected}")
        filled = [bool((each.amax_history[:, -5:] > 0).all()) for each in states_of(model)]
        report.expect("histories are filled", all(filled) and len(filled) == 13 * recipe.has_state, f"{name}: {filled}")
        if recipe.has_state:
            for options in ({"remat": True}, {"stacked": True, "remat": True}):
                others, other, _ = train(make(recipe, **options))
                off = max(abs(a / b - 1) for a, b in zip(others, losses, strict=True))
                report.expect("scan and checkpoint", off < 2e-3, f"{options}: {others} instead of {losses}")
                filled = all(bool((each.amax_history[..., -5:] > 0).all()) for each in states_of(other))
                report.expect("histories are filled", filled, f"{options}")


def check_states(report: Report):
    """An MLP under vmap, and the same products of whole batches by `dot_general`."""
    mlp = in_fp8(eqx.nn.MLP(64, 32, 128, 2, key=jax.random.key(1)), DELAYED)[0]
    x, y = (jax.random.normal(jax.random.key(number), (64, size)) for number, size in ((2, 64), (3, 32)))
    weights = [(each.weight, each.bias) for each in mlp.layers]
    states = [{"scale": each.fp8.scale, "amax_history": each.fp8.amax_history} for each in mlp.layers]

    def by_hand(weights, states):
        hidden = x
        for number, ((weight, bias), state) in enumerate(zip(weights, states, strict=True)):
            hidden = fp8.dot_general(hidden, weight, (((1,), (1,)), ((), ())), recipe=DELAYED, state=state) + bias
            hidden = jax.nn.relu(hidden) if number < 2 else hidden
        return jnp.mean((hidden - y) ** 2)

    losses, others = [], []
    step = eqx.filter_jit(eqx.filter_value_and_grad(lambda mlp: jnp.mean((jax.vmap(mlp)(x) - y) ** 2)))
    step_by_hand = jax.jit(jax.value_and_grad(by_hand, (0, 1)))
    for _ in range(6):
        loss, grads = step(mlp)
        new, grads = split(grads)
        mlp = apply_updates(mlp, jax.tree.map(lambda gradient: -0.1 * gradient, grads), new)
        other, (gradients, states) = step_by_hand(weights, states)
        weights = jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients)
        losses.append(float(loss)), others.append(float(other))
    found = [{"scale": each.fp8.scale, "amax_history": each.fp8.amax_history} for each in mlp.layers]
    off = largest_difference(found, states)
    report.worst["of a state, against dot_general, relative"] = off
    report.expect("states are those of dot_general", off < 1e-5, f"off by {off}")
    report.expect("states are those of dot_general", np.allclose(losses, others, rtol=1e-6), f"{losses} {others}")
    report.expect("learns", losses[-1] < losses[0], f"{losses}")
    report.expect("controls", largest_difference(found, jax.tree.map(lambda leaf: leaf * 1.01, states)) > 1e-3, "1 %")


def check_accumulation(report: Report):
    data = jnp.concatenate([batches(5)] * 2, axis=1)  # two equal microbatches are one batch
    once, model, _ = train(make(DELAYED), data[:, :ROWS])
    twice, other, _ = train(make(DELAYED), data, accumulate=2)
    off = max(abs(a / b - 1) for a, b in zip(twice, once, strict=True))
    report.expect("accumulation", off < 1e-3, f"{twice} instead of {once}")
    off = largest_difference([state.scale for state in states_of(other)], [state.scale for state in states_of(model)])
    report.expect("accumulation", off < 0.1, f"scales are off by {off}")

    def shared(model, tokens, convert):
        model = convert(model)
        return loss_fn(model, tokens) + loss_fn(model, tokens) / 2

    for convert in (by_maximum, lambda model: model):
        new = eqx.filter_jit(eqx.filter_grad(lambda model, convert=convert: shared(model, data[0, :ROWS], convert)))(
            make(DELAYED)
        )
        passes = {float(each.passes) for each in states_of(new)}
        report.expect("used twice", passes == ({1.0} if convert is by_maximum else {2.0}), f"{passes}")
        rows = states_of(new)[0].of_one_pass()["amax_history"][:2, -1]
        single = states_of(eqx.filter_jit(eqx.filter_grad(loss_fn))(make(DELAYED), data[0, :ROWS]))[0].amax_history[
            :2, -1
        ]
        report.expect("used twice", np.allclose(rows, single, rtol=1e-5), f"{rows} instead of {single}")


def check_files(report: Report):
    whole, _, _ = train(make(DELAYED))
    first, model, opt_state = train(make(DELAYED), batches()[:5])
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, (model, opt_state))
    file.seek(0)
    model, opt_state = eqx.tree_deserialise_leaves(file, (make(DELAYED), opt_state))
    second, _, _ = train(model, batches()[5:], opt_state=opt_state)
    report.expect("restored", first + second == whole, f"{first} {second} instead of {whole}")


def check_controls(report: Report):
    _, model, _ = train(make(DELAYED), batches()[:3], keep_states=False)
    report.expect("controls", not any(each.amax_history.any() for each in states_of(model)), "states thrown away")
    model = make(DELAYED)
    params, rest = eqx.partition(model, eqx.is_inexact_array)
    states, params = split(params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(jax.grad(lambda params: loss_fn(eqx.combine(params, states, rest), batches(1)[0])))(params)
    report.expect("controls", any("not by its state" in str(each.message) for each in caught), "no warning")
    try:
        apply_updates(model, eqx.filter(model, eqx.is_inexact_array), None)
        report.expect("controls", False, "gradients that were not split")
    except ValueError as error:
        report.expect("controls", "split gradients before the optimizer" in str(error), str(error))
    layer = fp8_equinox.Linear(32, 16, key=jax.random.key(0), recipe=DELAYED)
    try:
        jax.vmap(jax.grad(lambda layer, x: jnp.sum(layer(x))), (None, 0))(layer, jnp.ones((16, 32)))
        report.expect("controls", False, "gradients of each example")
    except ValueError as error:
        report.expect("controls", "multiple of 16, got 1" in str(error), str(error))


def check_mesh(report: Report):
    """Batches split over four devices, params on each of them."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    data = [jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("data"))) for tokens in batches(6)]
    for recipe in (RECIPES["delayed"], RECIPES["current"]):
        alone, _, _ = train(make(recipe), batches(6))
        model = make(recipe)
        arrays, static = eqx.partition(model, eqx.is_array)
        placed = eqx.combine(jax.device_put(arrays, jax.NamedSharding(mesh, jax.P())), static)
        losses, model, _ = train(placed, data)
        off = max(abs(a / b - 1) for a, b in zip(losses, alone, strict=True))
        report.worst[f"of a loss over a mesh, {type(recipe).__name__}, relative"] = off
        report.expect("mesh", off < 5e-3 and len(data[0].sharding.device_set) == 4, f"{losses} instead of {alone}")
        filled = [bool((state.amax_history[:, -6:] > 0).all()) for state in states_of(model)]
        report.expect("mesh", all(filled) and bool(filled) == recipe.has_state, f"histories {filled}")


CHECKS = [check_layers, check_training, check_states, check_accumulation, check_files, check_controls, check_mesh]


def main(arguments: list[str] | None = None) -> int:
    return run_script(Script(__file__, __doc__, CHECKS, anywhere=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
