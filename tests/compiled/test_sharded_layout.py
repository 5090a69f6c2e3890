"""Parameters split over a `tensor` axis as they are: queries, keys and values by heads, gate and up by columns,
out and down by rows.

A shard of a layer is the same layer with fewer heads or hidden features, and the sum of the shards' results is the
layer's. On CPU devices this is computed; for four H200s it is compiled, and nothing may be gathered, exchanged or
permuted on the way: the only communication is the sum of partial results, forward and backward.
"""

from functools import partial

import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.core.fp8_array import Fp8Pair
from jax_fp8.core.paths import map_with_names
from jax_fp8.kernels import extension
from jax_fp8.ops import passes

REASON = h200.missing_reason() or extension.missing_reason()
compiled = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SHARDS = 4
HEADS, KV_HEADS, HEAD_DIM, WIDTH, HIDDEN = 8, 4, 32, 256, 512
BATCH, SEQ = 4, 64
TOKENS = BATCH * SEQ
COLUMNS, ROWS = ("query", "key", "value", "gate", "up"), ("out", "down")


def attention(recipe, shards=1, **options):
    return fp8.SelfAttention(
        HEADS // shards, KV_HEADS // shards, norm="rmsnorm", rotary=True, use_bias=False, head_dim=HEAD_DIM,
        recipe=recipe, **options,
    )  # fmt: skip


def mlp(recipe, shards=1, **options):
    return fp8.LayerNormMLP(HIDDEN // shards, "swiglu", "rmsnorm", use_bias=False, recipe=recipe, **options)


LAYERS = {"attention": attention, "mlp": mlp}


def specs(params):
    """How each kernel is split: by the name of its layer."""

    def spec(names, _):
        return P(None, "tensor") if names[0] in COLUMNS else P("tensor", None) if names[0] in ROWS else P()

    return map_with_names(spec, params)


def gradients(layer, dy, params, x):
    """The result and the gradients for a known output gradient, with `layer(params, x)` on this device's part."""
    y, pullback = jax.vjp(layer, params, x)
    return y, *pullback(dy.astype(y.dtype))


def on_shards(make, recipe, mesh, params, **options):
    """`gradients` with each device's part of the parameters: partial results, and their sums over devices."""
    module = make(recipe, SHARDS, **options)

    def run(params, x, dy):
        y, dparams, dx = gradients(lambda params, x: module.apply({"params": params}, x), dy, params, x)
        norm = jax.tree.map(lambda g: lax.psum(g, "tensor"), dparams["norm"])
        return lax.psum(y, "tensor"), dparams | {"norm": norm}, lax.psum(dx, "tensor")

    split = specs(params)
    in_specs, out_specs = (split, P(), P()), (P(), split, P())
    return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def inputs():
    keys = jax.random.split(jax.random.key(1))
    return tuple(jax.random.normal(key, (BATCH, SEQ, WIDTH), jnp.float32) for key in keys)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recipe", [None, fp8.CurrentScaling()], ids=["plain", "current"])
def test_the_shards_of_a_layer_add_up_to_it(name, recipe):
    make, (x, dy) = LAYERS[name], inputs()
    module = make(recipe, dtype=jnp.float32)
    params = jax.jit(module.init)(jax.random.key(0), x)["params"]
    whole = partial(gradients, lambda params, x: module.apply({"params": params}, x))
    expected = jax.jit(whole)(dy, params, x)
    mesh = Mesh(np.array(jax.devices()[:SHARDS]), ("tensor",))
    got = jax.jit(on_shards(make, recipe, mesh, params, dtype=jnp.float32))(params, x, dy)
    kind = "block_gradient" if recipe else "float32"
    jax.tree.map(partial(reference.assert_close, kind=kind), got, expected)
    assert all(float(jnp.linalg.norm(leaf)) > 0.1 for leaf in jax.tree.leaves(expected))


def test_heads_that_were_cut_apart_would_be_noticed():
    """Negative control: columns split in another order than by heads are another layer."""
    x, dy = inputs()
    module = attention(None, dtype=jnp.float32)
    params = jax.jit(module.init)(jax.random.key(0), x)["params"]
    order = np.random.default_rng(0).permutation(HEADS)
    columns = (order[:, None] * HEAD_DIM + np.arange(HEAD_DIM)).ravel()
    shuffled = params | {"query": {"kernel": params["query"]["kernel"][:, columns]}}
    mesh = Mesh(np.array(jax.devices()[:SHARDS]), ("tensor",))
    y = jax.jit(on_shards(attention, None, mesh, params, dtype=jnp.float32))(shuffled, x, dy)[0]
    with pytest.raises(AssertionError, match="relative error"):
        reference.assert_close(y, module.apply({"params": params}, x), "float32")


@pytest.fixture
def every_kernel_has_its_wgrad(monkeypatch):
    """As in a model of a size that pays: these are too small."""
    monkeypatch.setattr(passes, "SMALLEST_WGRAD", 0)


def compile_sharded(make, recipe) -> h200.Program:
    mesh = h200.mesh(tensor=SHARDS)
    x = jax.ShapeDtypeStruct((BATCH, SEQ, WIDTH), jnp.bfloat16, sharding=h200.on_mesh(mesh))
    params = jax.eval_shape(make(recipe).init, jax.random.key(0), x)["params"]
    placed = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        params,
        specs(params),
    )
    run = on_shards(make, recipe, mesh, params, **({"implementation": "xla"} if make is attention else {}))
    return h200.compile(jax.jit(run), placed, x, x)


def gemm_shapes(program) -> list[tuple]:
    """m, n and k of every FP8 GEMM of a device."""
    shapes = (
        (call.operands[0].shape, call.results[0].shape) for call in program.gemms if call.target == "jax_fp8_gemm"
    )
    return sorted((a[0], d[1], a[1]) for a, d in shapes)


def permuted(program, *widths) -> list[str]:
    """What moves an array of all tokens and so many features, or a kernel of so many:
    copies, transposes, parts put together.
    """
    moving = ("copy", "transpose", "concatenate", "slice", "dynamic-slice", "all-to-all")
    features = {(TOKENS, width) for width in widths} | {(width, TOKENS) for width in widths}
    features |= {(WIDTH, width) for width in widths} | {(width, WIDTH) for width in widths}
    return [str(i) for i in program.instructions if i.opcode in moving and any(r.shape in features for r in i.results)]


@compiled
@pytest.mark.parametrize(
    "recipe", [fp8.CurrentScaling(), fp8.CurrentScaling(split_accumulator=())], ids=["split", "fast"]
)
def test_queries_keys_and_values_are_split_by_heads(recipe, every_kernel_has_its_wgrad):
    program = compile_sharded(attention, recipe)
    assert {reduction.opcode.removesuffix("-start") for reduction in program.collectives} == {"all-reduce"}
    assert not program.all_gathers
    query, kv = HEADS * HEAD_DIM // SHARDS, KV_HEADS * HEAD_DIM // SHARDS
    projections = [(TOKENS, width, WIDTH) for width in (query, kv, kv)]
    dgrad = [(TOKENS, WIDTH, query + 2 * kv)]
    wgrads = [(WIDTH, width, TOKENS) for width in (query, kv, kv)]
    out = [(TOKENS, WIDTH, query), (TOKENS, query, WIDTH), (query, WIDTH, TOKENS)]
    assert gemm_shapes(program) == sorted(projections + dgrad + wgrads + out)
    assert permuted(program, query + 2 * kv) == []


@compiled
def test_gate_and_up_are_split_by_columns(every_kernel_has_its_wgrad):
    program = compile_sharded(mlp, fp8.CurrentScaling())
    assert {reduction.opcode.removesuffix("-start") for reduction in program.collectives} == {"all-reduce"}
    hidden = HIDDEN // SHARDS
    up = [(TOKENS, 2 * hidden, WIDTH), (TOKENS, WIDTH, 2 * hidden), *[(WIDTH, hidden, TOKENS)] * 2]
    down = [(TOKENS, WIDTH, hidden), (TOKENS, hidden, WIDTH), (hidden, WIDTH, TOKENS)]
    assert gemm_shapes(program) == sorted(up + down)
    assert permuted(program, hidden, 2 * hidden) == []


@compiled
def test_one_kernel_of_all_columns_could_not_be_split():
    """Negative control: a quarter of the columns of `queries, keys, values` in one kernel holds no head's three parts;
    they must be gathered.
    """
    mesh, width = h200.mesh(tensor=SHARDS), (HEADS + 2 * KV_HEADS) * HEAD_DIM

    def local_heads(kernel, x):
        kernel = lax.all_gather(kernel, "tensor", axis=1, tiled=True)
        parts = jnp.split(kernel, [HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM], axis=1)
        shard = lax.axis_index("tensor")
        sizes = [part.shape[1] // SHARDS for part in parts]
        own = [lax.dynamic_slice_in_dim(part, shard * n, n, 1) for part, n in zip(parts, sizes, strict=True)]
        return [x @ part for part in own]

    run = jax.shard_map(
        local_heads, mesh=mesh, in_specs=(P(None, "tensor"), P()), out_specs=P(None, "tensor"), check_vma=False
    )
    kernel = jax.ShapeDtypeStruct((WIDTH, width), jnp.bfloat16, sharding=h200.on_mesh(mesh, None, "tensor"))
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16, sharding=h200.on_mesh(mesh))
    program = h200.compile(jax.jit(run), kernel, x)
    assert program.all_gathers


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_on_other_meshes_split_kernels_give_the_same_bits(axis_type):
    """Where an op does not run on shards of its own, kernels side by side are cast where they lie,
    and gathered in FP8.
    """
    mesh = Mesh(np.array(jax.devices()[:SHARDS]), ("tensor",), axis_types=(axis_type,))
    (x, _), layer = inputs(), mlp(fp8.CurrentScaling())
    params = jax.jit(layer.init)(jax.random.key(0), x)["params"]
    expected = jax.jit(lambda params, x: layer.apply({"params": params}, x))(params, x)
    with jax.set_mesh(mesh):
        by_columns = {name: {"kernel": P(None, "tensor")} for name in ("gate", "up")}
        placed = {
            name: jax.tree.map(
                lambda leaf, name=name: jax.device_put(
                    leaf, NamedSharding(mesh, by_columns[name]["kernel"] if name in by_columns else P())
                ),
                tree,
            )
            for name, tree in params.items()
        }
        got = jax.jit(lambda params, x: layer.apply({"params": params}, x))(placed, x)
    reference.assert_same_bits(np.asarray(got), np.asarray(expected))


@compiled
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("spec", "gathers"), [((None, None), 0), (("tensor", None), 0), ((None, "tensor"), 1)], ids=str
)
def test_the_optimizer_casts_kernels_side_by_side_in_place(spec, gathers, axis_type):
    """Shards of columns are gathered once, in FP8; whole kernels and shards of rows not at all."""
    mesh, tx = h200.mesh(axis_type, tensor=SHARDS), fp8.fused_adamw(1e-3)
    widths = {"query": 256, "key": 128, "value": 128}
    key = tuple((name, "kernel") for name in widths)

    def sharded(shape, dtype, *dims):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=h200.on_mesh(mesh, *dims))

    def step(params, opt_state, pair, grads, scale):
        request = fp8.InPlace({key: (pair, scale)})
        updates, opt_state = tx.update(grads, opt_state, params, in_place=request)
        return fp8.apply_updates(params, updates), opt_state, updates["query"]["kernel"].cast

    with jax.set_mesh(mesh):
        params = {name: {"kernel": sharded((WIDTH, width), jnp.float32, *spec)} for name, width in widths.items()}
        whole, scalar = sum(widths.values()), sharded((), jnp.float32)
        values, values_t = sharded((WIDTH, whole), fp8.E4M3, spec[0]), sharded((whole, WIDTH), fp8.E4M3, None, spec[0])
        opt_state = jax.eval_shape(tx.init, params)
        opt_state = jax.tree.map(lambda x: sharded(x.shape, x.dtype, *(spec if x.ndim else ())), opt_state)
        state = params, opt_state, Fp8Pair.with_shared_scale(values, values_t, scalar, scalar)
        program = h200.compile(jax.jit(step, donate_argnums=(0, 1, 2)), *state, params, scalar)
    shard_bytes = sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert program.custom_calls == {"jax_fp8_adam": 1}
    assert program.aliased_bytes == shard_bytes
    assert [copy for copy in program.copies if copy.results[0].bytes > 4] == []
    assert len(program.all_gathers) == gathers
    assert {operand.dtype for gather in program.all_gathers for operand in gather.operands} <= {"f8e4m3fn"}


@compiled
def test_parts_that_are_cut_would_be_noticed():
    """Negative control: columns that are cut from one array, and put together again."""

    def cut(x):
        a, b = jnp.split(x * 2, 2, axis=1)
        return jnp.concatenate([b, a], axis=1)

    x = jax.ShapeDtypeStruct((TOKENS, HIDDEN), jnp.bfloat16, sharding=h200.on_one_device())
    assert permuted(h200.compile(jax.jit(cut), x), HIDDEN, HIDDEN // 2)
