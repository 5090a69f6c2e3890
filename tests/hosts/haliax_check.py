"""Models of Haliax in FP8, with the real package: `make hosts` runs this on a CPU, in three minutes.

    python tests/hosts/haliax_check.py --output haliax_check.json

A small Transformer of Haliax's own layers learns rows that count by seven, in the train step of Haliax's guide. Losses
and states in FP8 are compared with those in float32, with those of `dot_general`, and with those of Haliax's own FP8;
with `Stacked` and `BlockSeq`, gradient checkpointing, `hax.vmap`, a compute dtype, and the gradient accumulation of
Levanter. Ends with one line per group of checks, and with exit code 1 if a check failed.
"""

import sys
import warnings
from pathlib import Path

import jax

if not hasattr(jax.core, "is_constant_dim"):  # Haliax 1.4.dev453 reads it, and jax 0.11 has dropped it
    jax.core.is_constant_dim = lambda dim: isinstance(dim, int)

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import haliax.quantization as hq
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.report import Report, Script, run_script

import jax_fp8 as fp8
from jax_fp8.integrations.haliax import CarriedState, dot_general_op, in_fp8

STEPS = 12
Batch, Pos, Embed, Heads, HeadSize = hax.make_axes(batch=8, position=32, embed=64, heads=4, head_size=16)
Mlp, Vocab, Layers, Three, Odd = hax.make_axes(mlp=128, vocab=160, layers=2, qkv=3, odd=10)
DELAYED = fp8.DelayedScaling(amax_history_len=8)
RECIPES = {"current": fp8.CurrentScaling(), "block": fp8.BlockScaling(), "delayed": DELAYED}
PRODUCTS = ("qkv", "out", "up", "down")
CLOSE = 0.02  # of a loss, relative


class Block(eqx.Module):
    norm: hnn.LayerNorm
    qkv: hnn.Linear
    out: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 4)
        return Block(
            hnn.LayerNorm.init(Embed),
            hnn.Linear.init(Embed, (Three, Heads, HeadSize), key=keys[0], out_first=True),
            hnn.Linear.init((Heads, HeadSize), Embed, key=keys[1], out_first=False),
            hnn.Linear.init(Embed, Mlp, key=keys[2], out_first=False),
            hnn.Linear.init(Mlp, Embed, key=keys[3], out_first=True),
        )

    def __call__(self, x):
        query, key, value = self.qkv(self.norm(x)).unbind(Three)
        key, value = key.rename({Pos.name: "key_position"}), value.rename({Pos.name: "key_position"})
        KeyPos = Pos.alias("key_position")
        mask = hax.arange(Pos).broadcast_axis(KeyPos) >= hax.arange(KeyPos)
        y = hnn.attention.dot_product_attention(KeyPos, HeadSize, query, key, value, mask=mask)
        x = x + self.out(y).rearrange(x.axes)
        return x + self.down(hnn.gelu(self.up(self.norm(x))))


class Model(eqx.Module):
    embedding: hnn.Embedding
    layers: hnn.Stacked | hnn.BlockSeq
    head: hnn.Linear
    odd: hnn.Linear

    @staticmethod
    def init(stacked=True, checkpointing=False):
        *keys, last = jax.random.split(jax.random.key(0), Layers.size + 1)
        kind = hnn.Stacked if stacked else hnn.BlockSeq
        layers = kind.init(Layers, Block, gradient_checkpointing=checkpointing)(key=jnp.stack(keys))
        head = hnn.Linear.init(Embed, Vocab, key=last, use_bias=False)
        odd = hnn.Linear.init(Embed, Odd, key=last)
        return Model(hnn.Embedding.init(Vocab, Embed, key=last), layers, head, odd)

    def __call__(self, tokens):
        return self.head(self.layers.fold(self.embedding(tokens) * 0.1))


def batches(steps=STEPS):
    starts = np.random.default_rng(0).integers(0, Vocab.size, (steps, Batch.size, 1))
    return jnp.asarray((starts + 7 * np.arange(Pos.size + 1)) % Vocab.size, jnp.int32)


def loss_fn(model, tokens):
    return loss_of(model(hax.named(tokens[:, :-1], (Batch.resize(len(tokens)), Pos))), tokens)


def loss_of(logits, tokens):
    labels = hax.named(tokens[:, 1:], (Batch.resize(len(tokens)), Pos))
    return hnn.cross_entropy_loss(logits.astype(jnp.float32), Vocab, hnn.one_hot(labels, Vocab)).scalar()


def loss_by_vmap(model, tokens):
    inputs = hax.named(tokens[:, :-1], (Batch, Pos))
    return loss_of(hax.vmap(lambda row: model(row), Batch)(inputs), tokens)


def loss_in_bfloat16(model, tokens):
    """As Levanter's policy does it: every float of the model is cast, states too."""
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, model)
    return loss_fn(cast, tokens)


def make(recipe=None, where=lambda path: True, compute_dtype=None, **options):
    model = Model.init(**options)
    return model if recipe is None else in_fp8(model, recipe, where, compute_dtype)[0]


def trainable(model):
    return hq.partition_for_grad_overwrite(eqx.filter(model, eqx.is_inexact_array))[1]


def by_microbatches(loss_fn, count=2):
    """Gradient accumulation as in Levanter: the state of the last microbatch; then all is divided by their number."""

    def differentiate(model, tokens):
        total, losses = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_inexact_array)), []
        for part in jnp.split(tokens, count):
            loss, grads = eqx.filter_value_and_grad(loss_fn)(model, part)
            overwrites, updates = hq.partition_for_grad_overwrite(grads)
            total = hq.apply_updates(total, updates, overwrites)
            losses.append(loss)
        return sum(losses) / count, jax.tree.map(lambda leaf: leaf / count, total)

    return differentiate


def train(model, loss_fn=loss_fn, data=None, differentiate=eqx.filter_value_and_grad, keep_states=True):
    """The losses of the train step of Haliax's guide, and the model."""
    optimizer = optax.adamw(3e-3)
    opt_state = optimizer.init(trainable(model))

    @eqx.filter_jit
    def step(model, opt_state, tokens):
        loss, grads = differentiate(loss_fn)(model, tokens)
        overwrites, grads = hq.partition_for_grad_overwrite(grads)
        updates, opt_state = optimizer.update(grads, opt_state, trainable(model))
        overwrites = overwrites if keep_states else hq.partition_for_grad_overwrite(model)[0]
        return hq.apply_updates(model, updates, overwrites), opt_state, loss

    losses = []
    for tokens in batches() if data is None else data:
        model, opt_state, loss = step(model, opt_state, tokens)
        losses.append(float(loss))
    return losses, model


def states_of(model):
    return [node for node in jax.tree.leaves(model, is_leaf=is_state) if is_state(node)]


def is_state(node):
    return isinstance(node, CarriedState)


def off_by(found, expected):
    return max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))


def check_layers(report: Report):
    for stacked in (False, True):
        model, listing = in_fp8(Model.init(stacked), DELAYED)
        blocks = ["layers.stacked"] if stacked else [f"layers.blocks.{number}" for number in range(Layers.size)]
        wanted = {"head", *(f"{block}.{name}" for block in blocks for name in PRODUCTS)}
        report.expect("every linear layer", set(listing.in_fp8) == wanted, f"{listing}")
        left = {"odd": "10 columns are no multiple of 16", "embedding": "Embedding without FP8"}
        report.expect("the others are listed", listing.left == left, f"{listing}")
        tokens = hax.named(batches(1)[0][:, :-1], (Batch, Pos))
        a, b = (eqx.filter_jit(Model.__call__)(each, tokens).array for each in (Model.init(stacked), model))
        off = float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a))
        report.expect("logits", 0 < off < 0.15, f"off by {off:.3f}")
    up = model.layers.stacked.up
    scales, largest = up.dot_general.state.scale, jnp.max(jnp.abs(up.weight.array), axis=(1, 2)) / 448
    report.expect("first scales", np.allclose(scales[:, 1], largest), f"{scales} instead of {largest}")
    chosen, others = (in_fp8(Model.init(), DELAYED, where)[1] for where in (r"stacked\.(up|down)", ["up", "down"]))
    report.expect("chosen", len(chosen.in_fp8) == 2 and chosen == others, f"{chosen} {others}")


def check_training(report: Report):
    expected, _ = train(make())
    report.expect("learns", expected[-1] < 0.6 * expected[0], f"{expected}")
    for name, recipe in RECIPES.items():
        losses, model = train(make(recipe))
        off = report.worst[f"of a loss, {name}, relative"] = off_by(losses, expected)
        report.expect(f"losses of {STEPS} steps", 0 < off < CLOSE, f"{name}: {losses} instead of {expected}")
        filled = [bool((each.amax_history[..., -5:] > 0).all()) for each in states_of(model)]
        report.expect("histories are filled", all(filled) and len(filled) == 5 * recipe.has_state, f"{name}: {filled}")
    own = hq.quantize_linear_layers(Model.init(), hq.QuantizationConfig(fp8=True, amax_history_length=8))
    off = report.worst["of a loss, Haliax's own FP8, relative"] = off_by(train(own)[0], expected)
    report.expect(f"losses of {STEPS} steps", 0 < off < 2 * CLOSE, f"Haliax's own: {off}")


def check_ways(report: Report):
    losses, _ = train(make(DELAYED), data=batches(6))
    ways = {
        "vmap": (make(DELAYED), loss_by_vmap),
        "checkpointing": (make(DELAYED, checkpointing=True), loss_fn),
        "BlockSeq": (make(DELAYED, stacked=False), loss_fn),
    }
    for name, (other, loss) in ways.items():
        found, other = train(other, loss, batches(6))
        off = off_by(found, losses)
        report.expect(name, off < 5e-3, f"{found} instead of {losses}")
        filled = all(bool((each.amax_history[..., -5:] > 0).all()) for each in states_of(other))
        report.expect(name, filled, "histories")
    casts = {"compute_dtype": (jnp.bfloat16, loss_fn), "a model in bfloat16": (None, loss_in_bfloat16)}
    for name, (dtype, loss) in casts.items():
        found, other = train(make(DELAYED, compute_dtype=dtype), loss, batches(6))
        report.expect(name, off_by(found, losses) < CLOSE, f"{found} instead of {losses}")
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(eqx.filter(other, eqx.is_inexact_array))}
        report.expect(name, dtypes == {jnp.dtype(jnp.float32)}, f"{dtypes}")


def check_states(report: Report):
    """Two layers with named axes, and the same products by `dot_general`."""
    up, down = hnn.Linear.init(Embed, Mlp, key=jax.random.key(1)), hnn.Linear.init(Mlp, Embed, key=jax.random.key(2))
    model = in_fp8([up, down], DELAYED)[0]
    x = hax.random.normal(jax.random.key(3), (Batch, Pos, Embed))
    weights = [np.asarray(each.weight.rearrange((each.In, each.Out)).array) for each in model]
    states = [fp8.init_state(DELAYED, jnp.asarray(weight)) for weight in weights]

    def loss(model):
        return hax.mean(hax.square(model[1](hax.tanh(model[0](x))) - x)).scalar()

    def by_hand(weights, states):
        hidden, numbers = x.array, (((2,), (0,)), ((), ()))
        for number, (weight, state) in enumerate(zip(weights, states, strict=True)):
            hidden = fp8.dot_general(hidden, weight, numbers, recipe=DELAYED, state=state)
            hidden = jnp.tanh(hidden) if number == 0 else hidden
        return jnp.mean((hidden - x.array) ** 2)

    losses, others = [], []
    step, step_by_hand = eqx.filter_jit(eqx.filter_value_and_grad(loss)), jax.jit(jax.value_and_grad(by_hand, (0, 1)))
    for _ in range(6):
        value, grads = step(model)
        overwrites, grads = hq.partition_for_grad_overwrite(grads)
        updates = jax.tree.map(lambda gradient: -0.1 * gradient, grads)
        updates = [eqx.tree_at(lambda each: each.bias.array, each, replace_fn=jnp.zeros_like) for each in updates]
        model = hq.apply_updates(model, updates, overwrites)
        other, (gradients, states) = step_by_hand(weights, states)
        weights = jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, weights, gradients)
        losses.append(float(value)), others.append(float(other))
    report.expect("learns", losses[-1] < losses[0], f"{losses}")
    report.expect("states are those of dot_general", np.allclose(losses, others, rtol=1e-6), f"{losses} {others}")
    for layer, state in zip(model, states, strict=True):
        found = layer.dot_general.state
        for name, expected in state.items():
            off = float(jnp.max(jnp.abs(getattr(found, name) / jnp.where(expected > 0, expected, 1) - (expected > 0))))
            report.worst["of a state, against dot_general, relative"] = off
            report.expect("states are those of dot_general", off < 1e-5, f"{name} is off by {off}")


def check_operands(report: Report):
    """Any order of axes, and axes that input and kernel share, for which jax's einsum swaps the operands."""
    Shared = hax.Axis("shared", 4)
    cases = {
        "in the middle": (Embed, Mlp, (Batch, Embed, Pos)),
        "first": (Embed, Mlp, (Embed, Batch, Pos)),
        "two, swapped": ((Heads, HeadSize), Mlp, (Batch, Pos, HeadSize, Heads)),
        "two out": (Embed, (Heads, HeadSize), (Batch, Pos, Embed)),
        "shared, swapped": (Embed, (Shared, Mlp), (Pos, Shared, Embed)),
        "shared": (Embed, (Shared, Mlp), (Shared, Pos, Embed)),
    }
    for name, (In, Out, axes) in cases.items():
        for out_first in (False, True):
            plain = hnn.Linear.init(In, Out, key=jax.random.key(1), out_first=out_first)
            layer = in_fp8(plain, DELAYED)[0]
            x = 3 * hax.random.normal(jax.random.key(2), axes)
            y, expected = layer(x), plain(x)
            new = eqx.filter_grad(lambda layer, x: hax.sum(hax.sin(layer(x))).scalar())(layer, x)
            off = float(jnp.linalg.norm((y - expected).array) / jnp.linalg.norm(expected.array))
            report.expect("axes", y.axes == expected.axes and 0 < off < 0.06, f"{name}: off by {off}")
            amaxes = new.dot_general.state.amax_history[:2, -1]
            wanted = [float(hax.max(hax.abs(each)).array) for each in (x, plain.weight)]
            report.expect("axes", np.allclose(amaxes, wanted), f"{name}: {amaxes} instead of {wanted}")
    single = hnn.Linear.init(Embed, Mlp, key=jax.random.key(1), dot_general=dot_general_op(RECIPES["current"]))
    report.expect("one layer", single(hax.ones((Batch, Embed))).axes == (Batch, Mlp), "")


def check_accumulation(report: Report):
    data = jnp.concatenate([batches(6)] * 2, axis=1)  # two equal microbatches are one batch
    once, model = train(make(DELAYED), data=data[:, : Batch.size])
    twice, other = train(make(DELAYED), data=data, differentiate=by_microbatches)
    report.expect("accumulation", off_by(twice, once) < 1e-3, f"{twice} instead of {once}")
    for found, expected in zip(states_of(other), states_of(model), strict=True):
        of_one_pass = found.scale / found.passes[..., None]
        off = float(jnp.max(jnp.abs(of_one_pass / expected.scale - 1)))
        report.expect("accumulation", off < 0.1, f"scales are off by {off}")
    passes = {float(value) for each in states_of(other) for value in each.passes.reshape(-1)}
    report.expect("accumulation", passes == {0.5}, f"{passes}")
    broken = [
        jnp.max(jnp.abs(a.scale / b.scale - 1)) > 0.4 for a, b in zip(*map(states_of, (other, model)), strict=True)
    ]
    report.expect("controls", all(broken), "states that were divided, without `passes`")


def check_controls(report: Report):
    _, model = train(make(DELAYED), data=batches()[:3], keep_states=False)
    report.expect("controls", not any(each.amax_history.any() for each in states_of(model)), "states thrown away")
    model = make(DELAYED)
    states, params = hq.partition_for_grad_overwrite(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        eqx.filter_jit(eqx.filter_grad(lambda params: loss_fn(eqx.combine(params, states), batches(1)[0])))(params)
    report.expect("controls", any("not by its state" in str(each.message) for each in caught), "no warning")


CHECKS = [
    check_layers, check_training, check_ways, check_states, check_operands, check_accumulation, check_controls,
]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    return run_script(Script(__file__, __doc__, CHECKS, anywhere=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
