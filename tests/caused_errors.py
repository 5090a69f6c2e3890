"""Calls that cause the errors of public names, for test_reference.py: for each name its errors, and a call of each."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
import jax_fp8.nnx
from jax_fp8.integrations import equinox, haliax, maxtext, qwix, tunix
from jax_fp8.integrations.vmapped import CarriedState

Call = tuple[type[Exception], Callable[[], object]]

X = jnp.ones((16, 16))
CONFIG = fp8.GPTConfig(vocab_size=32, num_layers=1, num_heads=1, hidden_size=16, max_seq_len=8)
TOKENS = jnp.ones((2, 8), jnp.int32)
ONE = jnp.float32(1)
MATRIX = fp8.quantize(X, fp8.E4M3, ONE)
RNGS = nnx.Rngs(0)
OTHER = fp8.DelayedScaling(amax_history_len=3)
STATE = {"scale": jnp.ones(3), "amax_history": jnp.zeros((3, 4))}
CARRIED = CarriedState.first(OTHER)
TABLE = fp8.GemmTable("NVIDIA H200", "13.1.0")


def variables():
    return fp8.Dense(16).init(jax.random.key(0), X)


def loss_fn(variables, batch):
    return jnp.mean(fp8.Dense(16).apply(variables, batch))


def no_scalar(variables, batch):
    return fp8.Dense(16).apply(variables, batch)


def mesh(axis):
    return jax.make_mesh((1,), (axis,))


def applied(layer, *args):
    """The variables of a layer, which its init makes by a call."""
    return jax.eval_shape(layer.init, jax.random.key(0), *args)


def make_step(loss_fn=loss_fn):
    return fp8.make_train_step(loss_fn, optax.sgd(1.0), fp8.DelayedScaling())


def make_state(**others):
    return fp8.TrainState.create(variables={**variables(), **others}, tx=optax.sgd(1.0))


def with_cache():
    return make_state(fp8_cache=fp8.cast_weights(variables(), fp8.DelayedScaling()))


def misnamed():
    """An NNX model in which the name of a layer is that of a GEMM."""
    model = nnx.Sequential()
    setattr(model, "gate+up", fp8.nnx.Linear(16, 16, rngs=RNGS))
    return model


def uncalled_provider():
    """A provider as it is before a model was called."""
    provider = object.__new__(qwix.Fp8Provider)
    provider._was_called = False
    return provider


def donated():
    """A state that another call has taken."""
    state = make_state()
    jax.tree.map(lambda leaf: leaf.delete(), state)
    return state


def error(call: Callable[[], object], kind: type[Exception] = ValueError) -> list[Call]:
    return [(kind, call)]


CALLS: dict[str, list[Call]] = {
    # Formats, recipes and arrays.
    "Format": error(lambda: fp8.Format(forward=fp8.E5M2, backward=fp8.E5M2)),
    "DelayedScaling": error(lambda: fp8.DelayedScaling(margin=200)),
    "CurrentScaling": error(lambda: fp8.CurrentScaling(amax_epsilon=-1.0)),
    "BlockScaling": error(lambda: fp8.BlockScaling(split_accumulator=("wgrad",))),
    "Fp8Array.dequantize": error(lambda: fp8.Fp8Array(MATRIX.values, jnp.ones((3, 1))).dequantize()),
    "quantize": error(lambda: fp8.quantize(X, fp8.E4M3, jnp.float32(0))),
    "matmul": error(lambda: fp8.matmul(MATRIX, MATRIX, bias=jnp.ones(3))),
    "dot_general": error(lambda: fp8.dot_general(X, X, (((), ()), ((), ())), recipe=fp8.CurrentScaling())),
    "einsum": error(lambda: fp8.einsum("md,dh->mh", X, X, recipe=fp8.DelayedScaling())),
    "init_state": error(lambda: fp8.init_state(None)),
    "by_maximum": error(lambda: fp8.by_maximum(X.astype(jnp.bfloat16))),
    "update_state": error(lambda: fp8.update_state({"layer": STATE}, OTHER)),
    "count_amaxes": error(lambda: fp8.count_amaxes({"layer": STATE}, None)),
    # Layers.
    "Dense.__call__": error(lambda: applied(fp8.Dense(10), X)),
    "LayerNormDense.__call__": error(lambda: applied(fp8.LayerNormDense(16, norm="batchnorm"), X)),
    "LayerNormMLP.__call__": error(lambda: applied(fp8.LayerNormMLP(16, dropout_rate=0.1), X)),
    "LayerNormMoE.__call__": error(lambda: applied(fp8.LayerNormMoE(16, num_experts=1), X)),
    "SelfAttention.__call__": error(lambda: applied(fp8.SelfAttention(num_heads=3), X)),
    "CrossAttention.__call__": error(lambda: applied(fp8.CrossAttention(num_heads=1), X, X, jnp.ones(16, jnp.int32))),
    "TransformerBlock.__call__": error(lambda: applied(fp8.TransformerBlock(1, 16, num_experts=-1), X)),
    "DotGeneral.__call__": error(lambda: fp8.DotGeneral().init(jax.random.key(0), X, X, (((), ()), ((), ())))),
    "Lora": error(lambda: fp8.Lora(rank=0)),
    "balance_experts": error(lambda: fp8.balance_experts(optax.sgd(0.1), -1)),
    "freeze": error(lambda: fp8.freeze(optax.sgd(0.1))),
    "freeze_kernels": error(lambda: fp8.freeze_kernels({"params": {}}, OTHER)),
    "merge_adapters": error(lambda: fp8.merge_adapters({"params": {}}, fp8.Lora(rank=2), {"kernel": X})),
    "RotaryScaling": error(lambda: fp8.RotaryScaling(factor=0.5)),
    "LinearScaling": error(lambda: fp8.LinearScaling(factor=0.0)),
    "DynamicScaling": error(lambda: fp8.DynamicScaling(factor=2.0, original_length=0)),
    "YarnScaling": error(lambda: fp8.YarnScaling(factor=2.0, original_length=64, beta_fast=0.5)),
    "LongRopeScaling": error(
        lambda: fp8.LongRopeScaling(short_factors=(1.0,), long_factors=(1.0, 2.0), original_length=64)
    ),
    # Models.
    "GPT.__call__": error(lambda: applied(fp8.GPT(CONFIG), jnp.ones((2, 9), jnp.int32))),
    "GPTConfig": error(lambda: fp8.GPTConfig(vocab_size=32, num_layers=1, num_heads=3, hidden_size=16)),
    "GPTConfig.preset": [
        (ValueError, lambda: fp8.GPTConfig.preset("gpt5")),
        (TypeError, lambda: fp8.GPTConfig.preset("tiny", depth=3)),
    ],
    "GPTConfig.from_dict": [
        (ValueError, lambda: fp8.GPTConfig.from_dict({"depth": 3})),
        (TypeError, lambda: fp8.GPTConfig.from_dict({"vocab_size": 32})),
    ],
    "next_token_loss": error(lambda: fp8.next_token_loss(fp8.GPT)),
    "generate": error(
        lambda: fp8.generate(fp8.GPT(CONFIG), {"params": {}}, TOKENS[:, :1], max_new_tokens=2, temperature=1.0)
    ),
    "load_huggingface": error(lambda: fp8.load_huggingface("nowhere")),
    "save_huggingface": error(lambda: fp8.save_huggingface("model", CONFIG, {})),
    "load_adapters": error(lambda: fp8.load_adapters("nowhere", CONFIG)),
    "save_adapters": error(lambda: fp8.save_adapters("adapters", CONFIG, {}, fp8.Lora(rank=2))),
    "load_config": error(lambda: fp8.load_config("nowhere")),
    "load_params": error(lambda: fp8.load_params("nowhere")),
    "save_params": error(lambda: fp8.save_params("a.safetensors", {"a.b": X})),
    # Training.
    "make_train_step": error(lambda: fp8.make_train_step(loss_fn, optax.sgd, None)),
    "TrainStep.init_state": error(lambda: make_step().init_state(lambda key: {"fp8": {}}, jax.random.key(0))),
    "TrainStep.state_shapes": error(lambda: make_step().state_shapes(lambda key: {"fp8": {}}, jax.random.key(0))),
    "TrainStep.place": error(lambda: make_step().place(variables(), X)),
    "TrainStep.__call__": error(lambda: make_step(no_scalar)(make_state(), X)),
    "TrainStep.diagnose": error(lambda: make_step().diagnose(donated(), X)),
    "TrainStep.warm_start": error(lambda: make_step().warm_start(donated(), X)),
    "TrainStep.start": error(lambda: make_step().start(variables())),
    "TrainStep.accumulate_step": error(
        lambda: make_step().accumulate_step(make_state(), make_step().start(make_state()), X, is_first_microbatch=3)
    ),
    "TrainStep.apply_step": error(lambda: make_step().apply_step(donated(), None)),
    "TrainStep.lower": error(lambda: make_step().lower(make_state(), X, diagnose=3)),
    "TrainStep.trace": error(lambda: make_step(no_scalar).trace(make_state(), X)),
    "TrainState.create": error(lambda: fp8.TrainState.create(variables={}, tx=optax.sgd(1.0))),
    "TrainState.replace": [
        (TypeError, lambda: make_state().replace(steps=3)),
        (ValueError, lambda: with_cache().replace(fp8={})),
    ],
    "Parallelism": error(lambda: fp8.Parallelism(mesh("model"))),
    "rules_from_names": error(lambda: fp8.rules_from_names(variables(), [("mlp", "tensor")])),
    "LayeredLoss": error(
        lambda: fp8.LayeredLoss((), lambda v, batch: batch, lambda v, x, name: x, lambda v, x, batch: x)({}, X, rngs={})
    ),
    "value_and_grad": error(lambda: fp8.value_and_grad(fp8.Dense(16))),
    "warm_start": error(lambda: fp8.warm_start(loss_fn, OTHER)(variables(), X)),
    "shardings": error(lambda: fp8.shardings(lambda: {}, parallel=mesh("data"))),
    "cast_weights": error(lambda: fp8.cast_weights(variables(), fp8.CurrentScaling())),
    "backward_dw": error(lambda: fp8.backward_dw(X)),
    "find_fault": error(lambda: fp8.find_fault({"tensors": []})),
    # The optimizer.
    "fused_adam": error(lambda: fp8.fused_adam(1e-3, eps=0.0)),
    "fused_adamw": error(lambda: fp8.fused_adamw(1e-3, nu_dtype=jnp.float16)),
    "apply_updates": error(lambda: fp8.apply_updates({"kernel": X}, {"bias": X})),
    # Inspection and tuning.
    "explain": error(lambda: fp8.explain(fp8.Dense(16), X)),
    "capture_report": error(lambda: fp8.capture_report(jax.jit(jnp.sin).lower(X))),
    "tune": error(lambda: fp8.tune(jnp.sin, X)),
    "tuned_gemms": error(lambda: fp8.tuned_gemms("gemms.json")),
    "GemmTable.load": error(lambda: fp8.GemmTable.load("nowhere")),
    "GemmTable.save": error(lambda: TABLE.save("/dev/null/gemms.json")),
    "GemmTable.updated": error(lambda: TABLE.updated(fp8.GemmTable("NVIDIA H100", "13.1.0"))),
    # NNX.
    "nnx.Linear": error(lambda: fp8.nnx.Linear(16, 10, rngs=RNGS)),
    "nnx.Linear.__call__": error(lambda: fp8.nnx.Linear(16, 16, rngs=RNGS)(X, out_sharding=P())),
    "nnx.LinearGeneral": error(lambda: fp8.nnx.LinearGeneral((4, 4), 16, rngs=RNGS)),
    "nnx.LinearGeneral.__call__": error(lambda: fp8.nnx.LinearGeneral(32, 16, rngs=RNGS)(X)),
    "nnx.Einsum": error(lambda: fp8.nnx.Einsum("BED,EDH->BEH", (2, 16, 16), rngs=RNGS)),
    "nnx.Einsum.__call__": error(lambda: fp8.nnx.Einsum("BD,DH->BH", (16, 16), rngs=RNGS)(jnp.ones((2, 3, 16)))),
    "nnx.LayerNormLinear": error(lambda: fp8.nnx.LayerNormLinear(16, 16, epsilon=-1.0, rngs=RNGS)),
    "nnx.LayerNormLinear.__call__": error(lambda: fp8.nnx.LayerNormLinear(32, 16, rngs=RNGS)(X)),
    "nnx.LayerNormMLP": error(lambda: fp8.nnx.LayerNormMLP(16, 16, activation="tanh", rngs=RNGS)),
    "nnx.LayerNormMLP.__call__": error(lambda: fp8.nnx.LayerNormMLP(32, 16, rngs=RNGS)(X)),
    "nnx.convert": error(lambda: fp8.nnx.convert(nnx.Linear(16, 16, rngs=RNGS))),
    "nnx.freeze_kernels": error(lambda: fp8.nnx.freeze_kernels(nnx.Linear(16, 16, rngs=RNGS))),
    "nnx.merge_adapters": error(lambda: fp8.nnx.merge_adapters(3)),
    # Adapters to libraries, which are not installed here.
    "tunix.in_fp8": error(lambda: tunix.in_fp8(3)),
    "maxtext.use": error(lambda: maxtext.use(None)) + error(lambda: maxtext.use(OTHER), ImportError),
    "maxtext.main": error(lambda: maxtext.main([]))
    + error(lambda: maxtext.main(["quantization=jax_fp8"]), ImportError),
    "qwix.Fp8Provider": error(lambda: qwix.Fp8Provider({"(": None})) + error(lambda: qwix.Fp8Provider({}), ImportError),
    "qwix.Fp8Provider.listing": error(lambda: uncalled_provider().listing()),
    "haliax.in_fp8": error(lambda: haliax.in_fp8({}, None)) + error(lambda: haliax.in_fp8({}, OTHER), ImportError),
    "haliax.dot_general_op": error(lambda: haliax.dot_general_op(None))
    + error(lambda: haliax.dot_general_op(OTHER), ImportError),
    "equinox.in_fp8": error(lambda: equinox.in_fp8({}, None)) + error(lambda: equinox.in_fp8({}, OTHER), ImportError),
    "equinox.apply_updates": error(lambda: equinox.apply_updates(CARRIED, CARRIED, None)),
    "nnx.value_and_grad": error(lambda: fp8.nnx.value_and_grad(3)),
    "nnx.warm_start": error(lambda: fp8.nnx.warm_start(loss_fn, has_aux=3)),
    "nnx.split": error(lambda: fp8.nnx.split(misnamed())),
    "nnx.fp8_state": error(lambda: fp8.nnx.fp8_state(misnamed())),
    "nnx.update_state": error(lambda: fp8.nnx.update_state(misnamed())),
}
