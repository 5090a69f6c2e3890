"""Attention on shards is attention; how its operands are tied together, and when heads can be split."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close

from jax_fp8.ops import attention as attention_op
from jax_fp8.ops.attention import as_heads, attention

BATCH, SEQ, HEADS, HEAD_DIM = 4, 8, 4, 16


def operands(kv_heads):
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.random.normal(key, (BATCH, SEQ, n, HEAD_DIM))
        for key, n in zip(keys, (HEADS, kv_heads, kv_heads), strict=True)
    ]


def loss(*operands):
    return jnp.sum(jnp.square(attention(*operands, causal=True, implementation="xla")))


@pytest.mark.parametrize(("kv_heads", "heads_are_split"), [(4, True), (2, False)])
@pytest.mark.parametrize("spec", [P("data"), P("data", None, "tensor"), P(None, "data", "tensor")], ids=str)
def test_on_explicit_shards(kv_heads, heads_are_split, spec):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    arrays = operands(kv_heads)
    placed = [jax.device_put(x, NamedSharding(mesh, spec if x.shape[2] % 4 == 0 else P(*spec[:2]))) for x in arrays]
    expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arrays)
    got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*placed)
    jax.tree.map(lambda actual, wanted: assert_close(actual, wanted, "float32"), got, expected)
    result = jax.eval_shape(lambda *x: attention(*x, causal=True, implementation="xla"), *placed)
    batch, seq, heads, _ = (*result.sharding.spec, None, None, None, None)[:4]
    assert (batch == ("data",) or batch == "data") == (spec[0] == "data") and seq is None
    assert bool(heads) == (heads_are_split and len(spec) == 3)


def seen_by(window):
    """Attention to what a query sees, by a mask written down pair by pair."""
    query, key, value = operands(4)
    mask = np.zeros((SEQ, SEQ), bool)
    for own in range(SEQ):
        for other in range(SEQ):
            mask[own, other] = 0 <= own - other < window
    return jax.nn.dot_product_attention(query, key, value, mask=jnp.asarray(mask)[None, None], implementation="xla")


@pytest.mark.parametrize("window", [1, 3, SEQ, SEQ + 5])
def test_a_window(window):
    got = attention(*operands(4), causal=True, implementation="xla", window=window)
    assert_close(got, seen_by(window), "float32")
    if window < SEQ:
        assert np.abs(got - seen_by(window + 1)).max() > 0.1
    alone = attention(*(x[0] for x in operands(4)), causal=True, implementation="xla", window=window)
    assert_close(alone, got[0], "float32")


def test_a_window_is_of_what_came_before():
    with pytest.raises(ValueError, match="attention must be causal, got window=3"):
        attention(*operands(4), causal=False, implementation="xla", window=3)


# Documents of one, two and five tokens; of eight; of four and four; a number that comes back.
SEGMENTS = jnp.int32([[1, 2, 2, 3, 3, 3, 3, 3], [7] * 8, [1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 2, 2, 2, 1, 1, 1]])


def packed(*operands, segment_ids=SEGMENTS, causal=True):
    return attention(*operands, causal=causal, implementation="xla", segment_ids=segment_ids)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_do_not_see_one_another(causal):
    got = packed(*operands(2), causal=causal)
    for row, numbers in enumerate(np.asarray(SEGMENTS)):
        for number in set(numbers.tolist()):
            own = np.flatnonzero(numbers == number)
            alone = [x[row : row + 1, own] for x in operands(2)]
            assert_close(got[row, own], attention(*alone, causal=causal, implementation="xla")[0], "float32")
    leaking = packed(*operands(2), segment_ids=SEGMENTS.at[0, 3].set(2), causal=causal)  # negative control
    assert np.abs(leaking - got)[0, 3:].max() > 0.1 and not np.abs(leaking - got)[1:].any()
    alone = attention(*(x[0] for x in operands(2)), causal=causal, implementation="xla", segment_ids=SEGMENTS[0])
    assert_close(alone, got[0], "float32")


def loss_of_packed(segment_ids, *operands):
    return jnp.sum(jnp.square(packed(*operands, segment_ids=segment_ids)))


@pytest.mark.parametrize("spec", [P("data"), P(None, None, "tensor"), P("data", None, "tensor")], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_documents_on_shards(kind, spec):
    mesh, of_loss = (
        jax.make_mesh((2, 2), ("data", "tensor"), (kind,) * 2),
        jax.value_and_grad(loss_of_packed, (1, 2, 3)),
    )
    expected = jax.jit(of_loss)(SEGMENTS, *operands(2))
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in operands(2)]
    segment_ids = jax.device_put(SEGMENTS, NamedSharding(mesh, P(*spec[:1])))
    jax.tree.map(
        lambda got, wanted: assert_close(got, wanted, "float32"), jax.jit(of_loss)(segment_ids, *placed), expected
    )


def test_heads_that_a_mesh_cuts_apart_are_brought_together():
    mesh, x = jax.make_mesh((4,), ("tensor",), devices=jax.devices()[:4]), jnp.ones((2, 4, 64))
    placed = jax.device_put(x, NamedSharding(mesh, P(None, None, "tensor")))
    assert jax.typeof(as_heads(placed, 16)).sharding.spec[2] == "tensor"
    assert jax.typeof(as_heads(placed, 32)).sharding.spec[2] is None
    assert as_heads(x, 32).shape == (2, 4, 2, 32)


def rule(kv_heads, **axes):
    types = [SimpleNamespace(shape=(BATCH, SEQ, heads, HEAD_DIM)) for heads in (HEADS, kv_heads, kv_heads)]
    return attention_op._shardy_rule(kv_heads, SimpleNamespace(shape=axes), types, types)


def test_how_operands_are_tied_together():
    assert rule(4, tensor=2) == (
        "b s0 h d0, b s1 h d1, b s2 h d2 -> b t0 h e0, b t1 h e1, b t2 h e2", {}
    )  # fmt: skip
    assert rule(2, data=2) == (
        "b s0 (h g0) d0, b s1 h d1, b s2 h d2 -> b t0 (h g0) e0, b t1 h e1, b t2 h e2", {"g0": 2}
    )  # fmt: skip
    assert rule(2, tensor=4) == (
        "b s0 o0 d0, b s1 o1 d1, b s2 o2 d2 -> b t0 r0 e0, b t1 r1 e1, b t2 r2 e2", {}
    )  # fmt: skip
    alone = SimpleNamespace(shape=(BATCH, SEQ, HEADS, HEAD_DIM))
    assert attention_op._shardy_rule(2, SimpleNamespace(shape={"tensor": 2}), [alone], [alone]) == (
        "b s0 (h g0) d0 -> b t0 (h g0) e0", {"g0": 2, "h": 2}
    )  # fmt: skip


def test_numbers_of_segments_are_tied_to_batches():
    types = [SimpleNamespace(shape=(BATCH, SEQ, HEADS, HEAD_DIM)), SimpleNamespace(shape=(BATCH, SEQ))]
    assert attention_op._shardy_rule(4, SimpleNamespace(shape={"data": 2}), types, types) == (
        "b s0 h d0, b s1 -> b t0 h e0, b t1", {}
    )  # fmt: skip


def test_tied_arrays_are_what_they_were():
    arrays = [*operands(2), SEGMENTS]
    jax.tree.map(np.testing.assert_array_equal, list(jax.jit(attention_op._tied, static_argnums=0)(2, *arrays)), arrays)
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(attention_op._tied(2, x)[0])))(arrays[1])
    np.testing.assert_array_equal(gradient, jnp.cos(arrays[1]))
    batched = jax.vmap(lambda x: attention_op._tied(2, x)[0])(arrays[1][None])
    np.testing.assert_array_equal(batched[0], arrays[1])


def gradients():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 8, 2, 16), jnp.bfloat16)

    def loss(*args):
        return jnp.sum(attention(*args, causal=True, implementation="xla").astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)


def test_strict_attention_is_attention():
    expected = gradients()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        actual = gradients()
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == jnp.bfloat16
        assert_close(one, other, "bfloat16")
