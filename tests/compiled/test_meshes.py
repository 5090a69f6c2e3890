"""The training step of a small GPT, compiled for four H200s on every kind of mesh, with cuDNN's attention: that it
compiles at all, which a run on CPU devices does not tell, and what goes over the wire.
"""

import h200
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.kernels import extension

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

DEVICES, BATCH, SEQ, WIDTH, HEADS, VOCAB = 4, 8, 192, 256, 8, 1024
TOKENS = BATCH * SEQ
COLUMNS, ROWS = ("query", "key", "value", "up", "gate"), ("out", "down")


@pytest.fixture(autouse=True)
def _cudnn(monkeypatch, traced_anew):
    """A version of cuDNN for whoever asks, as on a machine that has it."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)


def model(kv_heads=HEADS) -> fp8.GPT:
    config = fp8.GPTConfig(
        vocab_size=VOCAB, num_layers=2, num_heads=HEADS, num_kv_heads=kv_heads, hidden_size=WIDTH, max_seq_len=SEQ,
        norm="rmsnorm", activation="swiglu", use_bias=False,
    )  # fmt: skip
    return fp8.GPT(config, attention_implementation="cudnn")


def whole(path, shape) -> P:
    return P()


def by_first_dim(path, shape) -> P:
    return P("data") if shape[0] % DEVICES == 0 else P()


def by_heads_and_columns(path, shape) -> P:
    if path[-1] != "kernel":
        return P()
    return P(None, "tensor") if path[-2] in COLUMNS else P("tensor", None) if path[-2] in ROWS else P()


def variables_of(module):
    """Shapes; FP8 state and all."""
    tokens = jnp.zeros((BATCH, SEQ), jnp.int32)
    module = module.clone(attention_implementation="xla")  # to make params none is needed, and the CPU has no cuDNN
    return jax.eval_shape(module.init, jax.random.key(0), tokens)


def compile_step(mesh, spec_of, batch_spec, kv_heads=HEADS) -> h200.Program:
    module, tx = model(kv_heads), fp8.fused_adamw(1e-3)
    variables = variables_of(module)
    state = jax.eval_shape(lambda variables: fp8.TrainState.create(variables=variables, tx=tx), variables)

    def placed(path, leaf):
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        spec = P() if "fp8" in names or leaf.ndim == 0 else spec_of(names, leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.tree_util.tree_map_with_path(placed, state)
    batch = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32, sharding=NamedSharding(mesh, batch_spec))
    step = fp8.make_train_step(fp8.next_token_loss(module), tx, module.recipe)
    return h200.compile(step, state, batch)


def gathered(program, *dtypes) -> list[tuple[int, ...]]:
    """Shapes of what all-gathers bring together, of these dtypes."""
    return [result.shape for gather in program.all_gathers for result in gather.results if result.dtype in dtypes]


def gemm_shapes(program) -> list[tuple[int, int, int]]:
    """m, n and k of every FP8 GEMM of a device."""
    calls = [call for call in program.gemms if call.target == "jax_fp8_gemm"]
    return [(call.operands[0].shape[0], call.results[0].shape[1], call.operands[0].shape[1]) for call in calls]


def attentions(program) -> int:
    return sum(count for target, count in program.custom_calls.items() if "fmha" in target)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_data_parallel(axis_type):
    program = compile_step(h200.mesh(axis_type, data=DEVICES), whole, P("data"))
    assert attentions(program) == 4  # forward and backward of two layers
    assert program.all_gathers == []
    assert {reduction.opcode.removesuffix("-start") for reduction in program.collectives} == {"all-reduce"}
    assert all(TOKENS // DEVICES in shape and TOKENS not in shape for shape in gemm_shapes(program))  # its own tokens


def test_params_split_over_the_axis_of_the_batch():
    program = compile_step(h200.mesh(AxisType.Explicit, data=DEVICES), by_first_dim, P("data"))
    assert attentions(program) == 4
    assert (WIDTH, WIDTH) in gathered(program, "f8e4m3fn")  # kernels go over the wire in FP8
    in_full = {shape for shape in gathered(program, "bf16", "f32") if len(shape) > 1}
    assert in_full <= {(VOCAB, WIDTH), (SEQ, WIDTH)}  # embedding and positions
    tokens = {TOKENS, TOKENS // DEVICES, BATCH, BATCH // DEVICES}
    everything = gathered(program, "bf16", "f32", "f8e4m3fn", "f8e5m2")
    assert not [shape for shape in everything if tokens & set(shape)]  # no activations


@pytest.mark.parametrize(
    ("axis_type", "kv_heads"),
    [
        pytest.param(AxisType.Explicit, HEADS, id="heads-Explicit"),
        pytest.param(AxisType.Auto, HEADS // 2, id="grouped-Auto"),
        pytest.param(AxisType.Auto, HEADS, id="heads-Auto", marks=pytest.mark.slow),
        pytest.param(AxisType.Explicit, HEADS // 2, id="grouped-Explicit", marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel(axis_type, kv_heads):
    """Each device computes the queries, keys and values of its own heads, and attends with these."""
    program = compile_step(h200.mesh(axis_type, tensor=DEVICES), by_heads_and_columns, P(), kv_heads)
    assert attentions(program) == 4
    head_dim = WIDTH // HEADS
    of_a_device = [heads * head_dim // DEVICES for heads in (HEADS, kv_heads, kv_heads)]
    shapes = gemm_shapes(program)
    for width in set(of_a_device):
        own = 2 * of_a_device.count(width) + 2 * (width == WIDTH // DEVICES)  # and the gradient of `out`'s input
        assert shapes.count((TOKENS, width, WIDTH)) == own
    assert not gathered(program, "bf16")


def test_heads_that_an_axis_does_not_divide_are_computed_everywhere():
    """Two key heads for four devices: slow, but it compiles."""
    program = compile_step(h200.mesh(tensor=DEVICES), by_heads_and_columns, P(), kv_heads=2)
    assert attentions(program) == 4


def test_attention_that_nobody_ties_together_does_not_compile(monkeypatch):
    """Negative control: cuDNN's attention wants queries, keys and values split alike, and does not say so."""
    monkeypatch.setattr("jax_fp8.ops.attention.tied", lambda kv_heads, *operands: operands)
    with pytest.raises(jax.errors.JaxRuntimeError, match="same sharding"):
        compile_step(h200.mesh(tensor=DEVICES), by_heads_and_columns, P())


def test_shard_map_with_its_defaults():
    module, mesh = model(), h200.mesh(data=DEVICES)
    record = fp8.value_and_grad(fp8.next_token_loss(module))

    def step(variables, batch):
        loss, grads, fp8_state = record(variables, batch)
        return lax.pmean(loss, "data"), grads, lax.pmax(fp8_state, "data")

    variables = h200.shapes(variables_of(module), h200.on_mesh(mesh))
    batch = jax.ShapeDtypeStruct((BATCH, SEQ + 1), jnp.int32, sharding=h200.on_mesh(mesh, "data"))
    program = h200.compile(
        jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())), variables, batch
    )
    assert attentions(program) == 4
    assert program.custom_calls["jax_fp8_gemm"] >= 24
    assert {reduction.opcode.removesuffix("-start") for reduction in program.collectives} == {"all-reduce"}
