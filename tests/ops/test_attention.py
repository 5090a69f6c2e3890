"""Attention on shards is attention; how its operands are tied together, and when heads can be split."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close

from jax_fp8.ops import attention as attention_op
from jax_fp8.ops.attention import as_heads, attention

BATCH, SEQ, HEADS, HEAD_DIM = 4, 8, 4, 16


def operands(kv_heads):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(BATCH, SEQ, n, HEAD_DIM)).astype(np.float32) for n in (HEADS, kv_heads, kv_heads)]


@partial(jax.jit, static_argnames=("causal", "window"))
def attend(*operands, **options):
    return attention(*operands, implementation="xla", **options)


@partial(jax.jit, static_argnames="causal")
def differentiate(*operands, cotangent, **options):
    """The sine of attention, and its gradients."""
    got, pull = jax.vjp(lambda *of: jnp.sin(attention(*of, implementation="xla", **options)), *operands)
    return got, pull(cotangent)


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
    return jax.jit(jax.nn.dot_product_attention)(query, key, value, mask=mask[None, None])


@pytest.mark.parametrize("window", [1, 3, SEQ, SEQ + 5])
def test_a_window(window):
    got = attend(*operands(4), causal=True, window=window)
    assert_close(got, seen_by(window), "float32")
    if window < SEQ:
        assert np.abs(got - seen_by(window + 1)).max() > 0.1
    alone = attend(*(x[0] for x in operands(4)), causal=True, window=window)
    assert_close(alone, np.asarray(got)[0], "float32")


def test_a_window_is_of_what_came_before():
    with pytest.raises(ValueError, match="attention must be causal, got window=3"):
        attention(*operands(4), causal=False, implementation="xla", window=3)


# Documents of one, two and five tokens; of eight; of four and four; a number that comes back.
SEGMENTS = np.int32([[1, 2, 2, 3, 3, 3, 3, 3], [7] * 8, [1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 2, 2, 2, 1, 1, 1]])


def packed(*operands, segment_ids=SEGMENTS, causal=True):
    return np.asarray(attend(*operands, causal=causal, segment_ids=segment_ids))


def with_one(array, place, number):
    """The same but for one element."""
    changed = array.copy()
    changed[place] = number
    return changed


@pytest.mark.parametrize("causal", [True, False])
def test_documents_do_not_see_one_another(causal):
    got = packed(*operands(2), causal=causal)
    for row, numbers in enumerate(SEGMENTS):
        for number in set(numbers.tolist()):
            own = np.flatnonzero(numbers == number)
            alone = [x[row : row + 1, own] for x in operands(2)]
            assert_close(got[row, own], reference.attention(*alone, causal=causal)[0], "float32")
    leaking = packed(*operands(2), segment_ids=with_one(SEGMENTS, (0, 3), 2), causal=causal)  # negative control
    assert np.abs(leaking - got)[0, 3:].max() > 0.1 and not np.abs(leaking - got)[1:].any()
    alone = attend(*(x[0] for x in operands(2)), causal=causal, segment_ids=SEGMENTS[0])
    assert_close(alone, got[0], "float32")


def loss_of_packed(segment_ids, *operands):
    return jnp.sum(jnp.square(attend(*operands, causal=True, segment_ids=segment_ids)))


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


LENGTHS = np.int32([3, SEQ, 2, 5])


def padded(*operands, lengths=LENGTHS, causal=False, **options):
    return np.asarray(attend(*operands, causal=causal, lengths=lengths, **options))


@pytest.mark.parametrize("causal", [True, False])
def test_nobody_sees_padding(causal):
    """Values and gradients are those of each sequence alone; of padding they are zeros."""
    arrays = operands(2)
    options = {"cotangent": np.random.default_rng(1).normal(size=arrays[0].shape).astype(np.float32), "causal": causal}
    got, gradients = jax.device_get(differentiate(*arrays, **options, lengths=LENGTHS))
    for row, length in enumerate(LENGTHS):
        alone = [x[row : row + 1, :length] for x in (*arrays, options["cotangent"])]
        attended = reference.attention(*alone[:3], causal=causal)
        assert_close(got[row, :length], np.sin(attended)[0], "float32")
        _, *of_alone, _ = reference.attention(*alone[:3], alone[3] * np.cos(attended), causal)
        for gradient, wanted in zip(gradients, of_alone, strict=True):
            assert_close(gradient[row, :length], wanted[0], "float32")
            assert not gradient[row, length:].any()
        assert not got[row, length:].any()
    leaking, _ = differentiate(*arrays, **options, lengths=with_one(LENGTHS, 0, 4))  # negative control
    assert np.abs(leaking - got)[0].max() > 0.1 and not np.abs(leaking - got)[1:].any()
    alone = padded(*(x[0] for x in arrays), causal=causal, lengths=LENGTHS[0])
    assert_close(np.sin(alone), got[0], "float32")


def test_an_empty_sequence_has_no_nan():
    """It counts as one of one token."""
    of_loss = jax.jit(jax.value_and_grad(lambda query, told: loss_of_padded(told, query, *operands(2)[1:])))
    empty, one = (of_loss(operands(2)[0], {"lengths": with_one(LENGTHS, 2, length)}) for length in (0, 1))
    jax.tree.map(np.testing.assert_array_equal, empty, one)
    assert np.isfinite(empty[0]) and np.isfinite(empty[1]).all()


def test_padding_and_a_window():
    got = padded(*operands(4), causal=True, window=3)
    is_token = (np.arange(SEQ) < LENGTHS[:, None])[..., None, None]
    assert_close(got, np.where(is_token, seen_by(3), 0), "float32")


KEYS = 12  # of another sequence
KEY_LENGTHS = np.int32([7, KEYS, 1, 2])
KEY_SEGMENTS = np.int32([[3] * 5 + [1] * 3 + [4] * 4, [7] * 12, [2] * 6 + [1] * 6, [2] * 2 + [1] * 10])


def crossed():
    query, key, value = np.random.default_rng(2).normal(size=(3, BATCH, KEYS, HEADS, HEAD_DIM)).astype(np.float32)
    return query[:, :SEQ], key[:, :, :2], value[:, :, :2]


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["queries", "padded queries"])
def test_keys_of_another_sequence_that_end_in_padding(lengths):
    query, key, value = crossed()
    got = padded(query, key, value, lengths=lengths, key_lengths=KEY_LENGTHS)
    for row, length in enumerate(KEY_LENGTHS.tolist()):
        own = slice(0, SEQ if lengths is None else lengths[row])
        alone = query[row : row + 1, own], key[row : row + 1, :length], value[row : row + 1, :length]
        assert_close(got[row, own], reference.attention(*alone)[0], "float32")
        assert not got[row, own.stop :].any()
    leaking = padded(query, key, value, lengths=lengths, key_lengths=with_one(KEY_LENGTHS, 0, 8))
    assert np.abs(leaking - got)[0].max() > 0.1 and not np.abs(leaking - got)[1:].any()


def test_keys_of_documents_of_another_sequence():
    """The document 2 of the first row has no keys: its queries find zeros, and hand back none."""
    query, key, value = crossed()
    options = {"causal": False, "segment_ids": SEGMENTS, "key_segment_ids": KEY_SEGMENTS}
    got = np.asarray(attend(query, key, value, **options))
    for row in range(BATCH):
        for number in set(SEGMENTS[row].tolist()):
            own, others = (np.flatnonzero(numbers[row] == number) for numbers in (SEGMENTS, KEY_SEGMENTS))
            if not others.size:
                assert (row, number) == (0, 2) and not got[row, own].any()
                continue
            alone = query[row : row + 1, own], key[row : row + 1, others], value[row : row + 1, others]
            assert_close(got[row, own], reference.attention(*alone)[0], "float32")
    for own, found in ((np.s_[1:3], False), (np.s_[3:], True)):
        cotangent = with_one(np.zeros_like(got), (0, own), 1)
        gradients = jax.device_get(differentiate(query, key, value, cotangent=cotangent, **options)[1])
        assert [gradient.any() for gradient in gradients] == [found] * 3


def loss_of_padded(told, *operands):
    return jnp.sum(jnp.square(attention(*operands, causal=False, implementation="xla", **told)))


@pytest.mark.parametrize("of", ["lengths", "keys"])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
def test_padding_on_shards(kind, of):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (kind,) * 2)
    told = {"lengths": LENGTHS}
    if of == "keys":
        told = {"lengths": LENGTHS, "key_lengths": KEY_LENGTHS}
        told |= {"segment_ids": SEGMENTS, "key_segment_ids": KEY_SEGMENTS}
    arrays = operands(2) if of == "lengths" else crossed()
    of_loss = jax.jit(jax.value_and_grad(loss_of_padded, (1, 2, 3)))
    expected = of_loss(told, *arrays)
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", None, "tensor"))) for x in arrays]
    told = {name: jax.device_put(array, NamedSharding(mesh, P("data"))) for name, array in told.items()}
    jax.tree.map(lambda got, wanted: assert_close(got, wanted, "float32"), of_loss(told, *placed), expected)


def test_heads_that_a_mesh_cuts_apart_are_brought_together():
    mesh, x = jax.make_mesh((4,), ("tensor",), devices=jax.devices()[:4]), np.ones((2, 4, 64), np.float32)
    placed = jax.device_put(x, NamedSharding(mesh, P(None, None, "tensor")))
    assert jax.eval_shape(lambda x: as_heads(x, 16), placed).sharding.spec[2] == "tensor"
    assert jax.eval_shape(lambda x: as_heads(x, 32), placed).sharding.spec[2] is None
    assert jax.eval_shape(lambda x: as_heads(x, 32), x).shape == (2, 4, 2, 32)


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
        "b s0 o0 d0, b s1 o1 d1, b s2 o2 d2 -> b t0 r0 e0, b t1 r1 e1, b t2 r2 e2",
        {"need_replication_factors": ("o0", "o1", "o2", "r0", "r1", "r2")},
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
    types[1] = SimpleNamespace(shape=(BATCH,))
    assert attention_op._shardy_rule(4, SimpleNamespace(shape={"data": 2}), types, types) == (
        "b s0 h d0, b -> b t0 h e0, b", {}
    )  # fmt: skip


def test_tied_arrays_are_what_they_were():
    arrays = [*operands(2), SEGMENTS, LENGTHS]
    jax.tree.map(np.testing.assert_array_equal, list(jax.jit(attention_op.tied, static_argnums=0)(2, *arrays)), arrays)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.square(attention_op.tied(2, x)[0]))))(arrays[1])
    np.testing.assert_array_equal(gradient, 2 * arrays[1])
    batched = jax.jit(jax.vmap(lambda x: attention_op.tied(2, x)[0]))(arrays[1][None])
    np.testing.assert_array_equal(batched[0], arrays[1])


def gradients():
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 8, 2, 16)).astype(jnp.bfloat16)

    def loss(*args):
        return jnp.sum(attention(*args, causal=True, implementation="xla").astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query, key, value)


def test_strict_attention_is_attention():
    expected = gradients()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        actual = gradients()
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == jnp.bfloat16
        assert_close(one, other, "bfloat16")
