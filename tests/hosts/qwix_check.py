"""Flax models in FP8 by qwix's own interception, with the real package: `make hosts` runs this on a CPU.

    python tests/hosts/qwix_check.py --output qwix_check.json

A Linen model and an NNX model are given to `qwix.quantize_model` with `Fp8Provider`. Their losses of 20 steps, by a
plain optax step that puts the gradient of the state in its place, are compared with those of the model as it was, and
shown beside those of qwix's own `QtProvider` in FP8. With remat, stacked layers, gradient accumulation, adapters, and
Tunix's models. Ends with one line per group of checks, and with exit code 1 if a check failed.
"""

import sys
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from tunix_check import MODELS, drawn, model_inputs, peft_trainer

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.report import Report, Script, run_script

import jax_fp8 as fp8
import jax_fp8.nnx as fp8_nnx
from jax_fp8.integrations.qwix import Fp8Provider

STATE = "_overwrite_with_gradient"
CARRIED = nnx.variable_type_from_name(STATE, allow_register=True)
STEPS, ROWS, WIDTH, HEADS, CLASSES = 20, 64, 64, 4, 10
DELAYED = fp8.DelayedScaling(amax_history_len=8)
RECIPES = {"current": fp8.CurrentScaling(), "block": fp8.BlockScaling(), "delayed": DELAYED}
CLOSE = 0.03  # of a loss, relative
TX = optax.adam(3e-3)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 160, (2, 32)))
QT = qwix.QtRule(
    module_path=".*", weight_qtype=jnp.float8_e4m3fn, act_qtype=jnp.float8_e4m3fn, bwd_qtype=jnp.float8_e5m2
)


class Dense(nn.Module):
    """Products of every kind that is intercepted, one that does not fit, and one of activations."""

    remat: bool = False

    @nn.compact
    def __call__(self, x):
        dense = nn.remat(nn.Dense) if self.remat else nn.Dense
        x = nn.relu(dense(WIDTH, name="first")(x))
        heads = nn.DenseGeneral((HEADS, 16), name="heads")(x)
        scores = jnp.einsum("bhd,bkd->bhk", heads, heads).mean()
        x = nn.DenseGeneral(WIDTH, axis=(-2, -1), name="out")(heads + scores)
        x = nn.relu(jnp.dot(x, self.param("own", nn.initializers.lecun_normal(), (WIDTH, 96))))
        return nn.Dense(CLASSES, name="head")(x)


class Nnx(nnx.Module):
    def __init__(self, rngs, remat=False):
        self.first, self.remat = nnx.Linear(32, WIDTH, rngs=rngs), remat
        self.heads = nnx.Einsum("bd,dhe->bhe", (WIDTH, HEADS, 16), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, 16), WIDTH, axis=(-2, -1), rngs=rngs)
        self.own = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (WIDTH, 96)))
        self.head = nnx.Linear(96, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(nnx.remat(lambda layer, x: layer(x))(self.first, x) if self.remat else self.first(x))
        heads = self.heads(x)
        x = self.out(heads + jnp.einsum("bhd,bkd->bhk", heads, heads).mean())
        return self.head(nnx.relu(jnp.matmul(x, self.own[...])))


IN_FP8 = {"Linen": {"first", "heads", "out", "dot0"}, "NNX": {"first", "heads", "out", "matmul0"}}


def batches(steps=STEPS):
    keys = jax.random.split(jax.random.key(7), steps)
    teacher = jax.random.normal(jax.random.key(8), (32, CLASSES))
    xs = [jax.random.normal(key, (ROWS, 32)) for key in keys]
    return [(x, jnp.argmax(x @ teacher, 1)) for x in xs]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_linen(provider=None, steps=STEPS, by_state=True, remat=False, tx=TX, repeated=1):
    """The losses of a loop that anybody could have written, and the variables at its end."""
    model = Dense(remat) if provider is None else qwix.quantize_model(Dense(remat), provider)
    variables = model.init(jax.random.key(0), jnp.ones((1, 32)))
    params, state = variables["params"], {STATE: variables.get(STATE, {})}

    @jax.jit
    def step(params, state, opt_state, batch):
        def loss_fn(params, state):
            return cross_entropy(model.apply({"params": params, **state}, batch[0]), batch[1])

        loss, grads = jax.value_and_grad(loss_fn, (0, 1) if by_state else 0)(params, state)
        grads, state = grads if by_state else (grads, state)
        updates, opt_state = tx.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), state, opt_state

    opt_state, losses = tx.init(params), []
    for batch in batches(steps):
        for _ in range(repeated):
            loss, params, state, opt_state = step(params, state, opt_state, batch)
            losses.append(float(loss))
    return losses, {"params": params, **state}


def train_nnx(provider=None, steps=STEPS, by_state=True, remat=False, tx=TX, repeated=1):
    model = Nnx(nnx.Rngs(0), remat)
    if provider is not None:
        model = qwix.quantize_model(model, provider, jnp.ones((1, 32)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    by = nnx.DiffState(0, nnx.Any(nnx.Param, CARRIED) if by_state else nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch[0]), batch[1]), argnums=by)(model)
        grads, state = nnx.split_state(grads, nnx.Param, ...)
        nnx.update(model, state)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, batch)) for batch in batches(steps) for _ in range(repeated)]
    return losses, {STATE: nnx.to_pure_dict(nnx.state(model, CARRIED)), "params": nnx.state(model, nnx.Param)}


TRAIN = {"Linen": train_linen, "NNX": train_nnx}


def histories(variables):
    paths = jax.tree_util.tree_leaves_with_path(variables[STATE])
    return [np.asarray(leaf) for path, leaf in paths if "amax_history" in jax.tree_util.keystr(path)]


def off(losses, expected):
    return max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))


def check_losses(report: Report):
    for kind, train in TRAIN.items():
        expected, _ = train()
        report.expect("learns", expected[-1] < 0.8 * expected[0], f"{kind}: {expected}")
        for name, recipe in RECIPES.items():
            provider = Fp8Provider({".*": recipe})
            losses, variables = train(provider)
            report.worst[f"of a loss, {kind}, {name}, relative"] = off(losses, expected)
            report.expect("losses of 20 steps", 0 < off(losses, expected) < CLOSE, f"{kind}, {name}: {losses}")
            found = provider.listing()
            report.expect("listed", set(found.in_fp8) == IN_FP8[kind], f"{kind}: {found}")
            report.expect("listed", "10 columns" in found.left["head"] and len(found.left) == 2, f"{kind}: {found}")
            filled = [bool((history[:, -5:] > 0).all()) for history in histories(variables)]
            report.expect("state", filled == [True] * 4 * recipe.has_state, f"{kind}, {name}: {filled}")
        losses, _ = train(qwix.QtProvider([QT]))
        report.worst[f"of a loss, {kind}, qwix's own QtProvider, relative"] = off(losses, expected)
        mixed = Fp8Provider([("first", None), ("h.*", RECIPES["current"]), (".*", DELAYED)])
        losses, variables = train(mixed)
        report.expect("mixed rules", 0 < off(losses, expected) < CLOSE, f"{kind}: {losses}")
        report.expect("mixed rules", len(histories(variables)) == 2, f"{kind}: {variables[STATE]}")


def check_steps(report: Report):
    for kind, train in TRAIN.items():
        plain, _ = train(Fp8Provider({".*": DELAYED}))
        again, variables = train(Fp8Provider({".*": DELAYED}), remat=True)
        report.expect("remat", off(again, plain) < 1e-3 and len(histories(variables)) == 4, f"{kind}: {again}")
        four, variables = train(Fp8Provider({".*": DELAYED}), 5, tx=optax.MultiSteps(TX, 4), repeated=4)
        close = off(four[::4], plain[:5])
        report.worst[f"of a loss, {kind}, accumulated, relative"] = close
        report.expect("accumulation", close < CLOSE, f"{kind}: {four[::4]} instead of {plain[:5]}")
        filled = all(bool((history[:, 1:] > 0).all()) for history in histories(variables))  # 7 of 20
        report.expect("accumulation", filled, f"{kind}: histories move with each microbatch")


def check_controls(report: Report):
    """A step that does not differentiate by the state."""
    for kind, train in TRAIN.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses, variables = train(Fp8Provider({".*": DELAYED}), by_state=False)
        moved = any(history.any() for history in histories(variables))
        report.expect("controls", losses[-1] < 0.8 * losses[0] and not moved, f"{kind}: {losses}")
        if kind == "Linen":  # it is said once in a process
            said = any("but not by its state" in str(warning.message) for warning in caught)
            report.expect("controls", said, f"{[str(warning.message) for warning in caught]}")


def check_products(report: Report):
    """Values and state are those of fp8.dot_general, bit for bit."""
    x = jax.random.normal(jax.random.key(1), (ROWS, 32))
    model = qwix.quantize_model(nn.Dense(WIDTH), Fp8Provider({".*": DELAYED}))
    variables = model.init(jax.random.key(0), x)
    variables["params"]["bias"] += 1
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
    state = fp8.init_state(DELAYED, kernel)
    for step in range(3):
        grads = jax.jit(jax.grad(lambda variables: jnp.mean(model.apply(variables, x) ** 2)))(variables)

        def loss_fn(kernel, state):
            y = fp8.dot_general(x, kernel, (((1,), (0,)), ((), ())), recipe=DELAYED, state=state)
            return jnp.mean((y + bias) ** 2)

        gradient, state = jax.jit(jax.grad(loss_fn, (0, 1)))(kernel, state)
        report.bits("products", grads["params"]["kernel"], gradient, f"kernel gradient of step {step}")
        for leaf, value in state.items():
            report.bits("products", grads[STATE][f"dot_general0_{leaf}"], value, f"{leaf} after step {step}")
        variables = {"params": variables["params"], STATE: grads[STATE]}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(32)(nn.relu(nn.Dense(48)(x))), None


class Stack(nn.Module):
    has_axes: bool

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, **({STATE: 0} if self.has_axes else {})}
        return nn.scan(nn.remat(Block), variable_axes=axes, split_rngs={"params": True}, length=3)()(x, None)[0]


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 48, rngs=rngs), nnx.Linear(48, 32, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class NnxStack(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0).split(3)
        self.blocks = nnx.vmap(NnxBlock, in_axes=0, out_axes=0)(rngs)

    def __call__(self, x):
        body = nnx.remat(lambda x, block: block(x))
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


def check_stacked_layers(report: Report):
    x = jax.random.normal(jax.random.key(1), (ROWS, 32))
    model = qwix.quantize_model(Stack(True), Fp8Provider({".*": DELAYED}))
    grads = jax.jit(jax.grad(lambda variables: jnp.mean(model.apply(variables, x) ** 2)))(
        model.init(jax.random.key(0), x)
    )
    filled = [int((history > 0).sum()) for history in histories(grads)]
    report.expect("stacked layers", filled == [9, 9], f"Linen: {filled}")
    try:
        qwix.quantize_model(Stack(False), Fp8Provider({".*": DELAYED})).init(jax.random.key(0), x)
        message = "no error"
    except ValueError as error:
        message = str(error)
    report.expect("stacked layers", "give nn.scan or nn.vmap variable_axes" in message, message)
    current = qwix.quantize_model(Stack(False), Fp8Provider({".*": RECIPES["current"]}))
    y = current.apply(current.init(jax.random.key(0), x), x)
    report.expect("stacked layers", bool(jnp.isfinite(y).all()), "without state, no axes are needed")
    stack = qwix.quantize_model(NnxStack(), Fp8Provider({".*": DELAYED}), x)
    by = nnx.DiffState(0, nnx.Any(nnx.Param, CARRIED))
    grads = nnx.jit(nnx.grad(lambda stack: jnp.mean(stack(x) ** 2), argnums=by))(stack)
    state = {STATE: nnx.to_pure_dict(nnx.filter_state(grads, CARRIED))}
    filled = [int((history > 0).sum()) for history in histories(state)]
    report.expect("stacked layers", filled == [9, 9], f"NNX: {filled}")


def _lora():
    return qwix.LoraProvider(module_path=".*q_proj|.*kv_einsum|.*gate_proj|.*down_proj", rank=16, alpha=16.0)


def check_tunix(report: Report):
    inputs = model_inputs(peft_trainer.TrainingInput(input_tokens=TOKENS, input_mask=jnp.ones((2, 32), bool)))
    call = TOKENS, inputs["positions"], None, inputs["attention_mask"]
    for name in ("Llama 3", "Qwen3", "Gemma"):
        cls, config, attention, mlp, has_head, _ = MODELS[name]
        model = drawn(cls, config)
        before = np.asarray(model(*call)[0], np.float32)
        layers = [*(f"attn/{layer}" for layer in attention), *(f"mlp/{layer}" for layer in mlp)]
        wanted = {f"layers/{number}/{layer}" for number in (0, 1) for layer in layers}
        wanted |= {"lm_head"} if has_head else {"embedder"}  # the head of Gemma is its embedding, transposed
        provider = Fp8Provider({".*": RECIPES["current"]})
        found = np.asarray(qwix.quantize_model(model, provider, *call)(*call)[0], np.float32)
        report.expect("Tunix's models", set(provider.listing().in_fp8) == wanted, f"{name}: {provider.listing()}")
        error = np.linalg.norm(found - before) / np.linalg.norm(before)
        report.expect("Tunix's models", 0 < error < 0.2, f"{name}: logits off by {error:.3f}")
        _check_adapters(report, name, cls, config, call, wanted)


def _check_adapters(report, name, cls, config, call, wanted):
    provider = Fp8Provider({".*": DELAYED}, adapters=_lora())
    model = qwix.apply_lora_to_model(drawn(cls, config), provider, *call, rngs=nnx.Rngs(0))
    report.expect("adapters", set(provider.listing().in_fp8) == wanted, f"{name}: {provider.listing()}")
    by = nnx.DiffState(0, nnx.Any(nnx.LoRAParam, CARRIED))
    grads = nnx.jit(nnx.grad(lambda model: jnp.mean(model(*call)[0].astype(jnp.float32) ** 2), argnums=by))(model)
    moved = [bool(np.any(leaf)) for leaf in jax.tree.leaves(nnx.filter_state(grads, nnx.LoRAParam))]
    report.expect("adapters", len(moved) == 12 and sum(moved) == 6, f"{name}: lora_b alone has gradients, got {moved}")
    state = {STATE: nnx.to_pure_dict(nnx.filter_state(grads, CARRIED))}
    filled = sum(bool(history.any()) for history in histories(state))
    report.expect("adapters", filled == len(wanted), f"{name}: {filled} histories")
    for what, first, second in (("before", _lora(), Fp8Provider({".*": DELAYED})), ("after", provider, _lora())):
        try:
            once = qwix.apply_lora_to_model(drawn(cls, config), first, *call, rngs=nnx.Rngs(0))
            qwix.apply_lora_to_model(once, second, *call, rngs=nnx.Rngs(0))
            message = "no error"
        except ValueError as error:
            message = str(error)
        report.expect("adapters", "would take the first provider out" in message, f"{name}, {what}: {message}")
    converted = fp8_nnx.convert(
        qwix.apply_lora_to_model(drawn(cls, config), _lora(), *call, rngs=nnx.Rngs(0)), RECIPES["current"]
    )
    listed = {*converted.converted, *converted.left}
    report.expect("convert after adapters", wanted - listed <= {"embedder"}, f"{name}: {converted}")
    report.expect("convert after adapters", len(converted.left) == 6 + 1, f"{name}: {converted}")


CHECKS = [check_controls, check_losses, check_steps, check_products, check_stacked_layers, check_tunix]


def main(arguments: list[str] | None = None) -> int:
    return run_script(Script(__file__, __doc__, CHECKS, anywhere=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
