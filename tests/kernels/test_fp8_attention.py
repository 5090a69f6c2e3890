"""FP8 attention against attention in float64 written out; what the CUDA program says, beside what JAX's own would say;
and parts on several devices.
"""

import json
import re
from functools import cache, partial
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import TOLERANCE, assert_close

from jax_fp8.core.formats import E4M3
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.kernels import fp8_attention
from jax_fp8.kernels.fp8_attention import attend, attend_backward, check_head_dim, check_tokens

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 2, 128, 4, 2, 128
SIZES = {"query": 1.5, "key": 1.0, "value": 0.01, "doutput": 1e-4}  # so that a scale left out shows


@cache
def operands(seq=SEQ, keys=SEQ):
    rows = {"query": (seq, HEADS), "key": (keys, KV_HEADS), "value": (keys, KV_HEADS), "doutput": (seq, HEADS)}
    found = []
    for number, (name, of) in enumerate(rows.items()):
        x = SIZES[name] * np.random.default_rng(number).normal(size=(BATCH, *of, HEAD_DIM)).astype(np.float32)
        scale = reference.amax(x) / np.float32(448)
        found.append(Fp8Array(jnp.asarray(reference.quantize(x, E4M3, scale)[0]), jnp.float32(scale)))
    return found


def exact(query, key, value, doutput, causal):
    """Output and gradients of dequantized arrays in float64, and the amaxes of the four gradients."""
    arrays = (np.float64(np.asarray(of)) for of in (query, key, value, doutput))
    output, *gradients, dscores = reference.attention(*arrays, causal)
    return output, gradients, [np.abs(of).max() for of in (dscores, *gradients)]


def scales_of(amaxes):
    return tuple(np.float32(amax / 448) for amax in amaxes)


ATTEND = jax.jit(attend, static_argnames="causal")


@partial(jax.jit, static_argnames="causal")
def backward(query, key, value, doutput, scales, causal, **replaced):
    output, statistics = ATTEND(query, key, value, causal=causal)
    options = {"output": output, "statistics": statistics, "doutput": doutput, **replaced}
    return attend_backward(query, key, value, scales=scales, causal=causal, **options)


@pytest.mark.parametrize(("causal", "keys"), [(True, SEQ), (False, SEQ), (False, 2 * SEQ)])
def test_against_float64(causal, keys):
    """Each of two products in a row rounds one operand to E4M3, and the result is rounded once more."""
    arrays = operands(keys=keys)
    output, gradients, amaxes = exact(*arrays, causal)
    got, statistics = ATTEND(*arrays[:3], causal=causal)
    assert got.dtype == E4M3 and statistics.shape == (BATCH, KV_HEADS, HEADS // KV_HEADS, SEQ)
    assert_close(got.dequantize(), output, "float8_e4m3fn")
    found, measured = backward(*arrays, scales_of(amaxes), causal=causal)
    for one, other in zip(found, gradients, strict=True):
        assert one.dtype == E4M3
        assert_close(one.dequantize(), other, "linear")
    np.testing.assert_allclose(measured, amaxes, rtol=0.1)


def test_the_scale_of_the_output_bounds_it():
    """The output is at most the largest value, where all weights are on it; and it does not saturate there."""
    query, key, _, _ = operands()
    value = Fp8Array(np.full((BATCH, SEQ, KV_HEADS, HEAD_DIM), 448, E4M3), np.float32(3 / 448))
    output, _ = ATTEND(query, key, value, causal=False)
    assert_close(output.dequantize(), np.full(output.shape, 3.0), "float8_e4m3fn")
    assert np.abs(np.asarray(output.values, np.float32)).max() <= 448 / 2 * 1.07


@pytest.mark.parametrize("wrong", ["query", "key", "value", "doutput", "output", 0, 1, 2, 3], ids=str)
def test_a_wrong_scale_is_seen(wrong):
    """Negative controls of the tolerances above: a scale of what enters that is twice as large, and one of what is cast
    inside with which little is left.
    """
    arrays = dict(zip(SIZES, operands(), strict=True))
    _, gradients, amaxes = exact(*arrays.values(), True)
    scales = [*scales_of(amaxes)]
    replaced = {}
    if isinstance(wrong, int):
        expected = backward(*arrays.values(), scales, causal=True)[0]
        scales[wrong] = scales[wrong] * 2.0**16
        found = backward(*arrays.values(), scales, causal=True)[0]
        assert any(_error(one, other.dequantize()) > 0.05 for one, other in zip(found, expected, strict=True))
        return
    if wrong == "output":
        output, statistics = ATTEND(*list(arrays.values())[:3], causal=True)
        replaced = {"output": Fp8Array(output.values, 2 * output.scale), "statistics": statistics}
    else:
        arrays[wrong] = Fp8Array(arrays[wrong].values, 2 * arrays[wrong].scale)
    found, _ = backward(*arrays.values(), scales, causal=True, **replaced)
    assert any(_error(one, other) > 2 * TOLERANCE["linear"] for one, other in zip(found, gradients, strict=True))


def _error(found, expected) -> float:
    found, expected = (np.float64(np.asarray(of)) for of in (found, expected))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def test_amaxes_are_those_before_the_cast():
    """They do not depend on the scale of their own tensor, or a scale that is too small would stay."""
    arrays = operands()
    *_, amaxes = exact(*arrays, True)
    good = backward(*arrays, scales_of(amaxes), causal=True)[1]
    tiny = backward(*arrays, scales_of([amaxes[0], *(1e-3 * of for of in amaxes[1:])]), causal=True)[1]
    np.testing.assert_allclose(tiny, good, rtol=1e-6)


def lowered(causal, batch=BATCH, seq=SEQ, keys=SEQ):
    """The custom calls of the CUDA program, each with its config and its types."""

    def both(query, key, value, doutput, scales):
        output, statistics = attend(query, key, value, causal=causal)
        return attend_backward(query, key, value, output, statistics, doutput, scales, causal=causal)

    arrays = jax.eval_shape(lambda: operands(seq, keys))
    scales = (jax.ShapeDtypeStruct((), jnp.float32),) * 4
    return calls(jax.jit(both).trace(*arrays, scales).lower(lowering_platforms=("cuda",)).as_text())


def calls(text) -> dict[str, tuple[dict, str, str]]:
    found = {}
    for line in text.splitlines():
        of = re.search(r'custom_call @(__cudnn\$\w+)\(.*backend_config = "(.*?)", (operand_layouts.*)} : (.*)$', line)
        if of:
            config = json.loads(of[2].replace("\\22", '"'))["cudnn_fmha_backend_config"]
            layouts = re.search(r"result_layouts = (.*)$", of[3])
            assert layouts is not None
            found[of[1]] = config, layouts[1], of[4]
    return found


def without_defaults(config):
    """What a protocol buffer says: a field that is empty or zero is not there. One that may be there and zero is."""
    if isinstance(config, dict):
        kept = {name: without_defaults(of) for name, of in config.items()}
        present = {"workspace_size"}
        defaults = ("", "0", [], {}, False, "PRIMITIVE_TYPE_INVALID")
        return {name: of for name, of in kept.items() if name in present or of not in defaults}
    return config


def jaxs_own(causal) -> dict:
    """What jax's lowering writes for the same shapes; it is not public, and may go."""
    fused = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    mask = fused.MaskType.CAUSAL if causal else fused.MaskType.NO_MASK

    def both(query, key, value, doutput, scales):
        def forward(query, key, value, scales):
            options = {"scale": HEAD_DIM**-0.5, "mask_type": mask, "use_fp8": True}
            return fused.dot_product_attention(query, key, value, fp8_params=scales, **options)

        out, pull = jax.vjp(forward, query, key, value, scales)
        return pull((doutput, *out[1:]))

    arrays = [of.values for of in jax.eval_shape(operands)]
    scales = {name: jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32) for name in fused.fp8_params_keys}
    return calls(jax.jit(both).trace(*arrays, scales).lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize("causal", [True, False])
def test_the_program_is_the_one_that_jax_would_write(causal, with_kernels, monkeypatch):
    """Config, layouts of results, and the types of all operands and results."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.is_cuda_compute_capability_equal", lambda _: False)
    own, jaxs = lowered(causal), jaxs_own(causal)
    assert own.keys() == jaxs.keys() == {"__cudnn$fmhaSoftmaxF8", "__cudnn$fmhaSoftmaxBackwardF8"}
    for target, (config, layouts, types) in own.items():
        assert without_defaults(config) == without_defaults(jaxs[target][0])
        assert (layouts, types) == jaxs[target][1:]
    assert lowered(not causal)["__cudnn$fmhaSoftmaxF8"][0] != own["__cudnn$fmhaSoftmaxF8"][0]  # negative control


def test_scales_are_handed_over_in_their_places(with_kernels, monkeypatch):
    """Each operand of the custom calls, by its value: XLA's order, multipliers for what is cast. And the amaxes that
    come back: of queries, keys, values, scores.
    """
    seen = {}

    def call(target, results, by_tokens, config):
        def run(*operands):
            seen[target] = [float(of.reshape(())) for of in operands if of.shape == (1, 1, 1, 1)]
            numbers = count(1)
            return tuple(
                jnp.full(of.shape, next(numbers) if of.shape == (1, 1, 1, 1) else 0, of.dtype) for of in results
            )

        return run

    monkeypatch.setattr(fp8_attention, "_call", call)
    arrays = [of.values.reshape(*of.shape[:2], KV_HEADS, -1, HEAD_DIM) for of in operands()]
    query, key, value, doutput = arrays
    key, value = key[:, :, :, 0], value[:, :, :, 0]
    fp8_attention._forward_kernel(True, query, key, value, *map(jnp.float32, (2, 4, 8)), split={})
    assert seen["__cudnn$fmhaSoftmaxF8"] == [2, 4, 8, 2**-8, 2**8, 1 / 16]
    statistics = jnp.zeros((BATCH, KV_HEADS, HEADS // KV_HEADS, SEQ))
    scales = map(jnp.float32, (2, 4, 8, 16, 32, 64, 128, 256, 512))
    found = fp8_attention._backward_kernel(True, query, key, value, query, doutput, statistics, *scales, split={})
    assert dict(zip(fp8_attention.GRADIENTS, found[3:], strict=True)) == {
        "dquery": 1,
        "dkey": 2,
        "dvalue": 3,
        "dscores": 4,
    }
    known = [2, 4, 8, 2**-8, 16, 32, 64]
    assert seen["__cudnn$fmhaSoftmaxBackwardF8"] == [*known, 2**8, 1 / 64, 1 / 128, 1 / 256, 1 / 512]


def test_long_sequences_are_apart(with_kernels, monkeypatch):
    """The backward of each alone gives the gradients and the amaxes of all, from so many tokens on."""
    sizes = []

    def call(target, results, by_tokens, config):
        dimensions = config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]["dimensions"]
        sizes.append(int(dimensions[0]))

        def run(queries, key, value, output, doutput, statistics, *scales):
            gradients = queries * statistics.swapaxes(1, 2)[..., None], key + doutput[:, :, ::2], value
            values = [of.swapaxes(1, 2).astype(E4M3) for of in gradients]
            amaxes = [jnp.max(jnp.abs(of)) * scales[0] for of in (*gradients, statistics)]
            return *values, *(amax.reshape(1, 1, 1, 1) for amax in amaxes), None

        return run

    monkeypatch.setattr(fp8_attention, "_call", call)
    queries, keys = (4, SEQ, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM), (4, SEQ, KV_HEADS, HEAD_DIM)
    shapes = queries, keys, keys, queries, queries, (4, KV_HEADS, HEADS // KV_HEADS, SEQ)
    arrays = [np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)]
    arrays[5][2] *= 3  # what is largest is in one sequence
    scales = [np.float32(2)] * 9

    def backward(apart):
        sizes.clear()
        monkeypatch.setattr(fp8_attention, "SEQUENCES_APART", apart)
        found = fp8_attention._backward_kernel(True, *arrays, *scales, split={})
        return list(sizes), [np.asarray(of, np.float32) for of in found]

    (together, wanted), (apart, found) = backward(SEQ + 1), backward(SEQ)
    assert (together, apart) == ([4], [1, 1, 1, 1])
    for of, like in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(of, like)
    assert len({float(of) for of in found[3:]}) == 4 and all(np.any(of[0] != of[2]) for of in found[:3])


@pytest.mark.parametrize("spec", [P("data"), P("data", None, "tensor"), P(None, "data", "tensor")], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("tensor", [2, 4])
def test_on_shards(kind, spec, tensor):
    """Sequences are gathered, and heads where an axis does not divide those of the keys."""
    mesh = jax.make_mesh((2, tensor), ("data", "tensor"), (kind,) * 2, devices=jax.devices()[: 2 * tensor])
    arrays = operands()
    scales = scales_of([1e-5, 1e-4, 1e-4, 1e-3])

    def placed(of):
        own = spec if of.shape[2] % tensor == 0 else P(*spec[:2])
        return Fp8Array(jax.device_put(of.values, NamedSharding(mesh, own)), of.scale)

    @jax.jit
    def both(query, key, value, doutput):
        found = backward(query, key, value, doutput, scales, causal=True)
        return attend(query, key, value, causal=True)[0].dequantize(), [of.dequantize() for of in found[0]], found[1]

    expected, got = both(*arrays), both(*map(placed, arrays))
    jax.tree.map(lambda one, other: assert_close(one, other, "float8_e4m3fn"), got, expected)


def test_what_cudnn_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"mine: FP8 attention needs a head_dim of 128, .*got 64; change the heads"):
        check_head_dim("mine", 64)
    with pytest.raises(ValueError, match=r"mine: .*whole blocks of 128 tokens, got 100 tokens; change the length"):
        check_tokens("mine", 100, 100)
    with pytest.raises(ValueError, match="got 128 tokens that attend to 100"):
        check_tokens("mine", 128, 100)
    check_head_dim("mine", 128)
    check_tokens("mine", 128, 256)
