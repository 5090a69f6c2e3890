"""Attention of a new token to a cache: the reference by float64 and beside the op, shards, the program for a GPU."""

from functools import partial

import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fp8.core.formats import E4M3
from jax_fp8.kernels import extension
from jax_fp8.kernels.cached_attention import TARGET, attend_to_cache
from jax_fp8.kernels.casting import quantize_reference
from jax_fp8.ops.cached_attention import KeyValueCache, cached_attention
from jax_fp8.ops.rotary import rotate

BATCH, HEADS, KV_HEADS, HEAD_DIM, SLOTS, PROMPT_SLOTS = 4, 4, 2, 16, 20, 12
LENGTHS, STEP = [12, 1, 7, 0], 3
OWN = PROMPT_SLOTS + STEP
SCALE = HEAD_DIM**-0.5


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def operands(dtype=jnp.float32, cache=None, heads=HEADS, kv_heads=KV_HEADS):
    """The arrays of a call, and its scales, by name."""
    rows = BATCH, kv_heads, SLOTS, HEAD_DIM
    arrays = {
        "query": normal(0, BATCH, heads, HEAD_DIM, dtype=dtype),
        "key": normal(1, BATCH, kv_heads, HEAD_DIM, dtype=dtype),
        "value": normal(2, BATCH, kv_heads, HEAD_DIM, dtype=dtype),
        "keys": normal(3, *rows, dtype=cache or dtype),
        "values": normal(4, *rows, dtype=cache or dtype),
        "lengths": jnp.int32(LENGTHS),
        "step": jnp.int32(STEP),
    }
    if cache == E4M3:
        arrays |= {"key_scales": jnp.exp2(normal(5, *rows[:3])), "value_scales": jnp.exp2(normal(6, *rows[:3]))}
    return arrays


@partial(jax.jit, static_argnames=("prompt_slots", "scale", "window", "logit_cap"))
def run(query, key, value, keys, values, lengths, step, rotary=None, key_scales=None, value_scales=None, **how):
    how = {"prompt_slots": PROMPT_SLOTS, "scale": SCALE} | how
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    return attend_to_cache(query, key, value, keys, values, lengths, step, rotary=rotary, **scales, **how)


def full_attention(arrays, found, window=None, logit_cap=None):
    """Softmax attention in float64 of each row and head to the tokens it sees, of the cache that was written."""
    query, keys, values = (np.asarray(x).astype(np.float64) for x in (arrays["query"], found.keys, found.values))
    if found.key_scales is not None:
        keys, values = (
            keys * np.asarray(found.key_scales)[..., None],
            values * np.asarray(found.value_scales)[..., None],
        )
    expected = np.zeros_like(query)
    for row, length in enumerate(LENGTHS):
        tokens = [*range(length), *range(PROMPT_SLOTS, OWN + 1)][-(window or SLOTS) :]
        for head in range(query.shape[1]):
            of_head = head // (query.shape[1] // keys.shape[1])
            logits = keys[row, of_head, tokens] @ query[row, head] * SCALE
            logits = logits if logit_cap is None else logit_cap * np.tanh(logits / logit_cap)
            weights = np.exp(logits - logits.max())
            expected[row, head] = weights / weights.sum() @ values[row, of_head, tokens]
    return expected


HOW = [{}, {"window": 5}, {"window": 1}, {"logit_cap": 0.7}, {"window": 9, "logit_cap": 2.0}]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize(
    ("dtype", "cache"), [("float32", None), ("bfloat16", None), ("float16", E4M3), ("float32", E4M3)]
)
def test_the_reference_is_full_attention(dtype, cache, how):
    arrays = operands(dtype, cache)
    found = run(**arrays, **how)
    assert found.attended.dtype == dtype and found.attended.shape == (BATCH, HEADS, HEAD_DIM)
    reference.assert_close(found.attended, full_attention(arrays, found, **how), dtype)
    for wrong in ({"window": 4}, {"window": 4, "logit_cap": 0.2}):
        with pytest.raises(AssertionError):
            reference.assert_close(found.attended, full_attention(arrays, found, **how | wrong), dtype)


@pytest.mark.parametrize("cache", [None, E4M3])
def test_only_the_new_slot_is_written(cache):
    arrays = operands("bfloat16", cache)
    found, others = run(**arrays), np.arange(SLOTS) != OWN
    for name in ("keys", "values", *(["key_scales", "value_scales"] if cache else [])):
        before, after = np.asarray(arrays[name]), np.asarray(getattr(found, name))
        reference.assert_same_bits(after[:, :, others], before[:, :, others])
    if cache is None:
        reference.assert_same_bits(np.asarray(found.keys)[:, :, OWN], np.asarray(arrays["key"]))
        reference.assert_same_bits(np.asarray(found.values)[:, :, OWN], np.asarray(arrays["value"]))
        return
    for kept, scales, new in (("keys", "key_scales", "key"), ("values", "value_scales", "value")):
        rows = np.asarray(arrays[new])
        scale = reference.scale_from_amax(np.abs(rows.astype(np.float32)).max(-1), E4M3)
        reference.assert_same_bits(np.asarray(getattr(found, scales))[:, :, OWN], scale)
        expected = quantize_reference(rows, E4M3, scale[..., None])
        reference.assert_same_bits(np.asarray(getattr(found, kept))[:, :, OWN], np.asarray(expected))


@pytest.mark.parametrize("cache", [None, E4M3])
def test_slots_that_are_not_seen_have_no_influence(cache):
    arrays = operands("bfloat16", cache)
    slots = np.arange(SLOTS)
    unseen = np.where(slots < PROMPT_SLOTS, slots >= np.array(LENGTHS)[:, None], slots >= OWN)[:, None, :, None]
    spoiled = arrays | {
        name: jnp.where(unseen, jnp.nan, arrays[name]).astype(arrays[name].dtype) for name in ("keys", "values")
    }
    if cache:
        spoiled |= {name: jnp.where(unseen[..., 0], jnp.nan, arrays[name]) for name in ("key_scales", "value_scales")}
    reference.assert_same_bits(np.asarray(run(**spoiled).attended), np.asarray(run(**arrays).attended))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rotary_positions_are_those_of_the_op(dtype, fraction):
    arrays = operands(dtype)
    positions = arrays["lengths"] + STEP
    pairs = int(HEAD_DIM * fraction) // 2
    frequency = np.float32(10_000.0) ** (-np.arange(pairs, dtype=np.float32) / np.float32(pairs))
    angles = positions.astype(jnp.float32)[:, None] * frequency
    found = run(**arrays, rotary=(jnp.cos(angles), jnp.sin(angles)))
    query, key = (
        rotate(arrays[name][:, None], positions[:, None], fraction=fraction)[:, 0] for name in ("query", "key")
    )
    expected = run(**arrays | {"query": query, "key": key})
    reference.assert_close(found.keys, np.asarray(expected.keys), dtype)
    reference.assert_close(found.attended, np.asarray(expected.attended), dtype)
    with pytest.raises(AssertionError):
        reference.assert_close(found.attended, np.asarray(run(**arrays).attended), dtype)


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_attention_that_generation_has_had(dtype, how):
    """That op rounds its softmax weights to `dtype` as well."""
    arrays = operands(dtype)
    found = run(**arrays, **how)
    cache = KeyValueCache(arrays["keys"], arrays["values"], arrays["lengths"], arrays["step"], PROMPT_SLOTS)
    tokens = (arrays[name][:, None] for name in ("query", "key", "value"))
    attended, updated = cached_attention(*tokens, cache, implementation="xla", scale=SCALE, **how)
    reference.assert_close(found.attended, np.asarray(attended[:, 0]), dtype)
    reference.assert_same_bits(np.asarray(found.keys), np.asarray(updated.key))
    reference.assert_same_bits(np.asarray(found.values), np.asarray(updated.value))


def test_lengths_and_steps_out_of_range_count_as_the_nearest():
    arrays = operands()
    wrong = arrays | {"lengths": jnp.int32([100, 1, 7, -3]), "step": jnp.int32(99)}
    right = arrays | {"step": jnp.int32(SLOTS - PROMPT_SLOTS - 1)}
    for ours, other in zip(run(**wrong)[:3], run(**right)[:3], strict=True):
        reference.assert_same_bits(np.asarray(ours), np.asarray(other))


def test_under_vmap():
    arrays = operands()
    twice = {name: jnp.stack([x, x[::-1] if x.ndim > 1 else x]) for name, x in arrays.items()}
    found = jax.vmap(lambda of: run(**of))(twice)
    for number in range(2):
        alone = run(**{name: x[number] for name, x in twice.items()})
        reference.assert_close(found.attended[number], np.asarray(alone.attended), "float32")


# Rows and key heads are split. Slots and features are gathered, and heads of queries that do not make whole groups.
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("cache", [None, E4M3])
@pytest.mark.parametrize(
    ("of_query", "of_keys"),
    [
        (P("data", "tensor"), P("data", "tensor")),
        (P("data"), P("data", "tensor")),
        (P(None, None, "tensor"), P(None, None, "data", "tensor")),
        (P("tensor", "data"), P()),
    ],
    ids=str,
)
def test_on_shards(of_query, of_keys, cache, kind):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (kind,) * 2, devices=jax.devices()[:4])
    arrays = operands("bfloat16", cache)
    places = {"query": of_query, "keys": of_keys, "values": of_keys}
    if cache:
        places |= {name: P(*of_keys[:3]) for name in ("key_scales", "value_scales")}
    angles = normal(9, BATCH, 4)
    rotary = jnp.cos(angles), jnp.sin(angles)
    expected = run(**arrays, rotary=rotary)
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, NamedSharding(mesh, places.get(name, P()))) for name, x in arrays.items()}
        found = run(**placed, rotary=rotary)
    for got, wanted in zip(found, expected, strict=True):
        if got is not None:
            reference.assert_close(
                np.asarray(got).astype(np.float32), np.asarray(wanted).astype(np.float32), "bfloat16"
            )
    if of_keys == of_query:
        assert found.keys.sharding.is_equivalent_to(NamedSharding(mesh, of_keys), 4)
        assert found.attended.sharding.is_equivalent_to(NamedSharding(mesh, of_query), 3)


def test_query_heads_of_another_number_than_devices():
    """3 key heads on 2 devices: an Explicit mesh may split 6 query heads, but no group."""
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Explicit,), devices=jax.devices()[:2])
    arrays = operands(heads=6, kv_heads=3)
    with jax.set_mesh(mesh):
        query = jax.device_put(arrays["query"], NamedSharding(mesh, P(None, "tensor")))
        found = run(**arrays | {"query": query})
    reference.assert_close(np.asarray(found.attended), np.asarray(run(**arrays).attended), "float32")


@pytest.mark.skipif(TARGET not in extension.TARGETS, reason="needs the kernels, built from these sources")
@pytest.mark.skipif(h200.missing_reason() is not None, reason=str(h200.missing_reason()))
@pytest.mark.parametrize("cache", [None, E4M3])
def test_a_loop_of_tokens_writes_the_caches_in_place(cache):
    """Three layers are three launches in a graph, and nothing is copied."""
    arrays = operands("bfloat16", cache)
    names = "keys", "values", *(("key_scales", "value_scales") if cache else ())
    layers = [{name: arrays.pop(name) if number == 2 else arrays[name] for name in names} for number in range(3)]

    def token(step, carry, tokens):
        query, caches, updated = *carry, []
        for cache in caches:
            found = attend_to_cache(**tokens | cache | {"query": query}, prompt_slots=PROMPT_SLOTS, scale=SCALE)
            query = found.attended
            updated.append({name: getattr(found, name) for name in cache})
        return query, updated

    def generate(carry, tokens):
        return lax.fori_loop(0, 8, lambda step, carry: token(step, carry, tokens | {"step": step}), carry)

    carry, tokens = (arrays.pop("query"), layers), arrays
    placed = h200.shapes((carry, tokens), h200.on_one_device())
    program = h200.compile(jax.jit(generate, donate_argnums=0), *placed, xla_gpu_graph_min_graph_size=1)
    assert program.custom_calls[TARGET] == 3 and not program.outside_graphs["CustomCall"]
    assert program.aliased_bytes >= sum(x.nbytes for x in jax.tree.leaves(layers))
    assert not program.copies


REFUSED = [
    ({"query": normal(0, BATCH, HEADS, 24)}, r"needs a query \(batch, heads, head_dim\), .*got \(4, 4, 24\)"),
    ({"value": normal(0, BATCH, 1, HEAD_DIM)}, r"key and value \(batch, kv_heads, head_dim\)"),
    ({"keys": normal(0, BATCH, KV_HEADS, SLOTS)}, r"reshape them"),
    ({"query": normal(0, BATCH, 3, HEAD_DIM)}, r"1 to 16 queries for each key head, got head_dim=16, heads=3"),
    ({"query": normal(0, BATCH, 34, HEAD_DIM)}, r"heads=34 and kv_heads=2; use another attention"),
    ({"key": normal(1, BATCH, KV_HEADS, HEAD_DIM, dtype="bfloat16")}, r"of one dtype, .*got float32, bfloat16"),
    ({"keys": normal(3, BATCH, KV_HEADS, SLOTS, HEAD_DIM, dtype="float16")}, r"got float16 and float32; make the"),
    ({"lengths": jnp.int32([1])}, r"needs lengths i32\[batch\] and a step i32\[\], got int32\[1\] and int32\[\]"),
    ({"step": jnp.float32(1)}, r"and float32\[\]; cast or reshape them"),
    ({"prompt_slots": SLOTS}, r"a slot behind them, got prompt_slots=20 of 20 slots"),
    ({"scale": float("inf")}, r"needs a finite scale, got inf"),
    ({"window": 0}, r"needs a window of at least 1, got 0; pass None"),
    ({"logit_cap": 0.0}, r"needs a finite logit_cap above 0, got 0.0"),
    ({"rotary": (jnp.ones((BATCH, 9)),) * 2}, r"f32 \(4, rotated / 2\) with at most 16 rotated features, got float32"),
    ({"rotary": (jnp.ones((BATCH, 4)), jnp.ones((BATCH, 2)))}, r"got float32\[4, 4\], float32\[4, 2\]"),
    ({"key_scales": jnp.ones((BATCH, KV_HEADS, SLOTS))}, r"for no other, got 1 of them and float32; pass both"),
]


@pytest.mark.parametrize(
    ("wrong", "sentence"), REFUSED, ids=lambda value: "" if isinstance(value, str) else next(iter(value))
)
def test_what_is_refused(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        run(**operands() | wrong)


def test_scales_that_do_not_fit_are_refused():
    arrays = operands(cache=E4M3)
    with pytest.raises(ValueError, match=r"needs key_scales and value_scales .*got 0 of them and float8_e4m3fn"):
        run(**arrays | {"key_scales": None, "value_scales": None})
    with pytest.raises(
        ValueError, match=r"needs scales f32\[4, 2, 20\], one for each slot of a head, got float32\[4, 2, 19\]"
    ):
        run(**arrays | {"key_scales": jnp.ones((BATCH, KV_HEADS, SLOTS - 1))})
