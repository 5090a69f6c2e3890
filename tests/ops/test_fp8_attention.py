"""Attention in FP8 is attention, also its gradients; its amaxes reach three states; and what it keeps is in FP8."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_close

from jax_fp8.core import fp8_gemm
from jax_fp8.core.formats import E4M3, HYBRID, Format
from jax_fp8.core.fp8_gemm import Fp8Gemm, Record
from jax_fp8.core.recipe import DelayedScaling
from jax_fp8.ops.fp8_attention import AttentionGemms, fp8_attention

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 2, 128, 4, 2, 128
STATES = ("scores", "values", "gradients")


def operands(dtype=jnp.bfloat16):
    shapes = {0: (BATCH, SEQ, HEADS), 1: (BATCH, SEQ, KV_HEADS), 2: (BATCH, SEQ, KV_HEADS), 3: (BATCH, SEQ, HEADS)}
    sizes = 1.5, 1.0, 0.01, 1e-3
    return [
        (sizes[seed] * np.random.default_rng(seed).normal(size=(*shape, HEAD_DIM))).astype(dtype)
        for seed, shape in shapes.items()
    ]


def own_amaxes(refs=None, fp8_format=HYBRID, is_recorded=True, **fields):
    """Gemms whose tensors are all scaled by their own amaxes, as in a warm start."""
    recipe = DelayedScaling(fp8_format=fp8_format)
    records = [Record() if refs is None else Record(refs[name]) for name in STATES]
    return AttentionGemms(*(Fp8Gemm(recipe, "layer", None, of, None, is_recorded, **fields) for of in records))


def with_scales(amaxes, fp8_format=HYBRID, **options):
    """Gemms that know the scales of all tensors from these amaxes of each state."""
    gemms = own_amaxes(fp8_format=fp8_format, **options)
    largest = np.array([np.float32(jnp.finfo(fp8_format.dtype_of(row)).max) for row in range(3)])
    known = [jnp.asarray(np.where(amaxes[name] > 0, amaxes[name], np.float32(1)) / largest) for name in STATES]
    return AttentionGemms(*(replace(getattr(gemms, name), scales=of) for name, of in zip(STATES, known, strict=True)))


def run(gemms, causal=True, arrays=None):
    """The result, its gradients, and the amaxes of the forward."""

    @jax.jit
    def passes(query, key, value, cotangent):
        (out, amaxes), pull = jax.vjp(lambda *of: fp8_attention(*of, gemms, causal=causal), query, key, value)
        return out, pull((cotangent.astype(out.dtype), jax.tree.map(jnp.zeros_like, amaxes))), amaxes

    return passes(*(operands() if arrays is None else arrays))


@cache
def recorded(causal=True, fp8_format=HYBRID):
    """The amaxes f32[3] of each state, after one pass."""
    query, key, value, cotangent = operands()

    @jax.jit
    def passes(query, key, value, cotangent):
        refs = {name: jax.new_ref(jnp.zeros(3)) for name in STATES}
        gemms = own_amaxes(refs, fp8_format)
        (_, amaxes), pull = jax.vjp(lambda *of: fp8_attention(*of, gemms, causal=causal), query, key, value)
        pull((cotangent, jax.tree.map(jnp.zeros_like, amaxes)))
        return {name: ref[...] for name, ref in refs.items()}

    return jax.device_get(passes(query, key, value, cotangent))


def plain(causal=True):
    query, key, value, cotangent = operands(jnp.float32)
    out, dquery, dkey, dvalue, _ = reference.attention(query, key, value, cotangent, causal)
    return out, (dquery, dkey, dvalue)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("known", ["scales", "own amaxes"])
def test_against_float32(causal, known):
    """Three roundings to E4M3 one after the other: of what enters, inside, and of the result."""
    gemms = own_amaxes() if known == "own amaxes" else with_scales(recorded(causal))
    out, gradients, _ = run(gemms, causal)
    expected, of_plain = plain(causal)
    assert out.dtype == jnp.bfloat16
    assert_close(out, expected, "linear_gradient")
    for one, other in zip(gradients, of_plain, strict=True):
        assert one.dtype == jnp.bfloat16
        assert_close(one, other, "linear_gradient")
    with pytest.raises(AssertionError, match="relative error"):  # negative control
        assert_close(run(gemms, not causal)[1][0], of_plain[0], "linear_gradient")


def test_own_amaxes_are_the_scales_that_a_state_would_have():
    """To the bit: as a history of one step, after one warm start."""
    jax.tree.map(np.testing.assert_array_equal, run(own_amaxes())[:2], run(with_scales(recorded()))[:2])


def test_the_amaxes_of_all_tensors_are_recorded():
    query, key, value, cotangent = operands()
    _, (dquery, dkey, dvalue), (of_scores, of_values) = run(own_amaxes())
    found = recorded()

    def amax(x):
        return float(reference.amax(x))

    assert found["scores"][:2].tolist() == of_scores.tolist() == [amax(query), amax(key)]
    assert found["values"].tolist() == [0, amax(value), amax(cotangent)] and of_values.tolist() == [0, amax(value)]
    np.testing.assert_allclose(found["gradients"], [amax(of) for of in (dquery, dkey, dvalue)], rtol=0.07)
    assert 0 < found["scores"][2] < 2 * HEAD_DIM**-0.5 * amax(cotangent) * amax(value) * HEAD_DIM


def test_scales_of_rows_in_e5m2_are_those_of_e4m3_to_the_bit():
    found = recorded()
    both = (run(with_scales(found, fp8_format)) for fp8_format in (HYBRID, Format(forward=E4M3, backward=E4M3)))
    jax.tree.map(np.testing.assert_array_equal, *both)
    jax.tree.map(np.testing.assert_array_equal, found, recorded(fp8_format=Format(forward=E4M3, backward=E4M3)))


def test_a_state_that_no_amax_reaches_is_not_used_for_gradients():
    """Its scales may be those of the beginning, at which gradients vanish."""
    amaxes = recorded() | {"gradients": np.full(3, 448 * 2**20, np.float32)}
    _, (dquery, *_), _ = run(with_scales(amaxes))
    assert not np.any(dquery)
    fp8_gemm._warn_unrecorded.cache_clear()
    with pytest.warns(UserWarning, match="is differentiated without"):
        _, (dquery, *_), _ = run(with_scales(amaxes, is_recorded=False))
    assert_close(dquery, plain()[1][0], "linear_gradient")


def test_what_is_kept_is_in_fp8():
    """Queries, keys, values, output; and f32 statistics. Nothing of 16 bits but what the caller holds anyway."""
    gemms = with_scales(recorded())
    forward = lambda *of: fp8_attention(*of, gemms, causal=True)[0]  # noqa: E731
    pull = jax.eval_shape(lambda *of: jax.vjp(forward, *of)[1], *operands()[:3])
    large = sorted((of.dtype.name, of.size) for of in jax.tree.leaves(pull) if of.size > 16)
    sizes = [BATCH * SEQ * heads * HEAD_DIM for heads in (KV_HEADS, KV_HEADS, HEADS, HEADS)]
    assert large == [("float32", BATCH * SEQ * HEADS), *(("float8_e4m3fn", size) for size in sizes)]


def test_strict_attention_is_attention():
    expected = run(own_amaxes())
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.tree.map(np.testing.assert_array_equal, run(own_amaxes()), expected)


def test_one_sequence_and_a_batch_of_them():
    gemms, arrays = with_scales(recorded()), operands()
    out, gradients, _ = run(gemms)
    alone = jax.vmap(lambda *of: run(gemms, arrays=of)[:2])(*arrays)
    jax.tree.map(lambda one, other: assert_close(one, other, "bfloat16"), alone, (out, gradients))


@pytest.mark.parametrize("implementation", ["cudnn", "xla"])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("tensor", [2, 4])
def test_on_shards(kind, implementation, tensor):
    mesh = jax.make_mesh((2, tensor), ("data", "tensor"), (kind,) * 2, devices=jax.devices()[: 2 * tensor])

    def loss(query, key, value, cotangent):
        out, amaxes = fp8_attention(query, key, value, own_amaxes(), causal=True, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) * cotangent.astype(jnp.float32)), amaxes

    both = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)

    expected = jax.jit(both)(*operands())
    specs = [P("data", None, "tensor") if of.shape[2] % tensor == 0 else P("data") for of in operands()]
    placed = [jax.device_put(of, NamedSharding(mesh, spec)) for of, spec in zip(operands(), specs, strict=True)]
    got = jax.jit(both)(*placed)
    jax.tree.map(lambda one, other: assert_close(one, other, "bfloat16"), got, expected)
