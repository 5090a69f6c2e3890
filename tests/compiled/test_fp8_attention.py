"""A training step whose attention is in FP8, compiled for H200s: cuDNN's calls for FP8 on meshes of every kind, what
they read and write, and nothing around them but the casts.
"""

import math
from collections import Counter

import h200
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8 import kernels
from jax_fp8.kernels import extension

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

BATCH, SEQ, WIDTH, HEADS, HEAD_DIM, VOCAB = 4, 256, 256, 4, 128, 1024
FORWARD, BACKWARD = "__cudnn$fmhaSoftmaxF8", "__cudnn$fmhaSoftmaxBackwardF8"


@pytest.fixture(autouse=True)
def _cudnn(monkeypatch, traced_anew):
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)


def model(kv_heads=2, fp8_attention=True, **fields) -> fp8.GPT:
    config = fp8.GPTConfig(
        vocab_size=VOCAB, num_layers=2, num_heads=HEADS, num_kv_heads=kv_heads, hidden_size=WIDTH, max_seq_len=SEQ,
        head_dim=HEAD_DIM, norm="rmsnorm", activation="swiglu", positions="rotary", use_bias=False,
    )  # fmt: skip
    return fp8.GPT(config, **{"attention_implementation": "cudnn", "fp8_attention": fp8_attention, **fields})


def by_heads(path, shape) -> P:
    sides = dict.fromkeys(("query", "key", "value", "up", "gate"), P(None, "tensor")) | dict.fromkeys(
        ("out", "down"), P("tensor", None)
    )
    return sides.get(path[-2], P()) if path[-1] == "kernel" else P()


def whole(path, shape) -> P:
    return P()


def compile_step(mesh, batch_spec=None, spec_of=whole, **fields) -> h200.Program:
    module, tx = model(**fields), fp8.fused_adamw(1e-3)
    tokens = jnp.zeros((BATCH, SEQ), jnp.int32)
    attends = {"attention_implementation": None if module.fp8_attention else "xla"}
    variables = jax.eval_shape(module.clone(**attends).init, jax.random.key(0), tokens)
    state = jax.eval_shape(lambda variables: fp8.TrainState.create(variables=variables, tx=tx), variables)

    def placed(path, leaf):
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        spec = P() if "fp8" in names or leaf.ndim == 0 else spec_of(names, leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree_util.tree_map_with_path(placed, state)
    batch = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32, sharding=NamedSharding(mesh, batch_spec or P()))
    return h200.compile(fp8.make_train_step(fp8.next_token_loss(module), tx, module.recipe), state, batch)


def attentions(program, target=FORWARD) -> list:
    return [call for call in program.instructions if call.target == target]


def test_one_graph_and_what_is_around_the_calls():
    """Beside the program with attention in bfloat16: four casts a layer, and what is no longer FP8. The gradients of
    queries and of keys become bfloat16 where they are turned back, in a pass that is there anyway.
    """
    mesh = h200.mesh(data=1)
    program, plain = compile_step(mesh), compile_step(mesh, fp8_attention=False)
    assert program.graphs == 1 and not program.outside_graphs
    added = program.custom_calls - plain.custom_calls
    assert added == {FORWARD: 2, BACKWARD: 2, "jax_fp8_quantize": 2 * 4}
    kv_heads = 2

    def passes(of):
        """How many times XLA's own kernels write an array like the queries, or like keys."""
        made = [i for i in of.instructions if i.opcode == "fusion" and i.launches]
        counted = Counter(r.shape for i in made for r in i.results if r.dtype == "bf16" and len(r.shape) == 4)
        return counted[BATCH, SEQ, HEADS, HEAD_DIM], counted[BATCH, SEQ, kv_heads, HEAD_DIM]

    (of_queries, of_keys), before = passes(program), passes(plain)
    assert (of_queries - before[0], of_keys - before[1]) == (2, 2)  # the output of each layer, the gradient of values
    assert [i.results[0].shape for i in program.copies] == [i.results[0].shape for i in plain.copies]
    transposes = [i for i in program.instructions if i.opcode == "transpose" and i.launches and i.in_entry]
    assert not transposes


def test_long_sequences_have_a_backward_each(monkeypatch):
    """In one graph still, and the forward is one call for all of them."""
    together = compile_step(h200.mesh(data=1))
    monkeypatch.setattr(kernels.fp8_attention, "SEQUENCES_APART", SEQ)
    jax.clear_caches()
    apart = compile_step(h200.mesh(data=1))
    assert apart.graphs == 1 and not apart.outside_graphs
    assert (len(attentions(together, BACKWARD)), len(attentions(apart, BACKWARD))) == (2, 2 * BATCH)
    assert len(attentions(apart)) == 2


SPLIT = [
    pytest.param(AxisType.Auto, 2, id="Auto"),
    pytest.param(AxisType.Explicit, 2, id="Explicit"),
    pytest.param(AxisType.Auto, 1, id="Auto-one-key-head", marks=pytest.mark.slow),
    pytest.param(AxisType.Explicit, 1, id="Explicit-one-key-head", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("axis_type", "kv_heads"), SPLIT)
def test_every_device_has_its_batches_and_its_heads(axis_type, kv_heads):
    """Where an axis does not divide the key heads, heads are whole."""
    mesh = h200.mesh(axis_type, data=2, tensor=2)
    program = compile_step(mesh, P("data"), by_heads, kv_heads=kv_heads)
    parts = math.gcd(2, kv_heads)
    own = (BATCH // 2, SEQ, HEADS // parts, HEAD_DIM), (BATCH // 2, SEQ, kv_heads // parts, HEAD_DIM)
    for target, tensors in ((FORWARD, 3), (BACKWARD, 5)):
        calls = attentions(program, target)
        assert len(calls) == 2
        for call in calls:
            queries, keys = own
            expected = [queries, keys, keys, queries, queries][:tensors]
            assert [operand.shape for operand in call.operands[:tensors]] == expected


def test_heads_that_an_axis_does_not_divide():
    """Two key heads for four devices of an axis, parts of which could split them: heads are whole."""
    program = compile_step(h200.mesh(tensor=4), None, by_heads)
    calls = [call for target in (FORWARD, BACKWARD) for call in attentions(program, target)]
    assert [call.operands[0].shape for call in calls] == [(BATCH, SEQ, HEADS, HEAD_DIM)] * 4


def test_heads_that_nobody_ties_together_do_not_compile(monkeypatch):
    """A negative control."""
    monkeypatch.setattr("jax_fp8.ops.fp8_attention.tied", lambda kv_heads, *arrays: arrays)
    with pytest.raises(jax.errors.JaxRuntimeError, match="not divisible by axis_size=4"):
        compile_step(h200.mesh(tensor=4), None, by_heads)


def test_in_a_shard_map_that_checks():
    module, mesh = model(), h200.mesh(data=2)
    record = fp8.value_and_grad(fp8.next_token_loss(module))

    def step(variables, batch):
        loss, grads, fp8_state = record(variables, batch)
        return lax.pmean(loss, "data"), grads, lax.pmax(fp8_state, "data")

    variables = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((BATCH, SEQ), jnp.int32))
    variables = h200.shapes(variables, h200.on_mesh(mesh))
    batch = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32, sharding=h200.on_mesh(mesh, "data"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    program = h200.compile(jax.jit(mapped), variables, batch)
    assert len(attentions(program)) == len(attentions(program, BACKWARD)) == 2
    assert all(call.operands[0].shape == (BATCH // 2, SEQ, HEADS, HEAD_DIM) for call in attentions(program))
    assert {reduction.opcode.removesuffix("-start") for reduction in program.collectives} == {"all-reduce"}


@pytest.mark.filterwarnings("ignore:delayed scaling is differentiated without")
def test_gradients_whose_amaxes_reach_no_state_take_three_passes():
    """Their scales are found first. A negative control of the counts above."""
    layer = fp8.SelfAttention(2, head_dim=HEAD_DIM, fp8_attention=True)
    x = jax.ShapeDtypeStruct((1, 128, 256), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    variables, x = (h200.shapes(of, h200.on_one_device()) for of in (variables, x))
    gradient = jax.grad(lambda variables, x: layer.apply(variables, x).astype(jnp.float32).sum(), argnums=1)
    program = h200.compile(jax.jit(gradient), variables, x)
    assert len(attentions(program)) == 1 and len(attentions(program, BACKWARD)) == 3
