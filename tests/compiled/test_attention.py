"""Attention of packed documents, of padded sequences and over a window, compiled for H200s: cuDNN's, on meshes of both
kinds, with a mask of each device's own documents, and its own lengths.
"""

import re

import h200
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_fp8.ops import attention as attention_op
from jax_fp8.ops.attention import attention

REASON = h200.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

BATCH, SEQ, HEADS, KV_HEADS, HEAD_DIM = 4, 256, 8, 4, 128


@pytest.fixture(autouse=True)
def _cudnn(monkeypatch):
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)


def compiled(mesh, spec, of_segments=(), **options):
    """Gradients of attention whose operands are split by `spec`, and whose segment_ids are by `of_segments`."""

    def loss(segment_ids, *operands):
        return jnp.sum(
            attention(*operands, causal=True, implementation="cudnn", segment_ids=segment_ids, **options) ** 2.0
        )

    shapes = [jax.ShapeDtypeStruct((BATCH, SEQ, heads, HEAD_DIM), jnp.bfloat16) for heads in (HEADS, *[KV_HEADS] * 2)]
    segment_ids = h200.shapes(jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32), h200.on_mesh(mesh, *of_segments))
    gradients = jax.jit(jax.grad(loss, argnums=(1, 2, 3)))
    return h200.compile(gradients, segment_ids, *(h200.shapes(of, h200.on_mesh(mesh, *spec)) for of in shapes))


def padded(mesh, spec, **options):
    """Gradients of attention to keys that end in padding, whose operands are split by `spec`."""

    def loss(told, *operands):
        return jnp.sum(attention(*operands, causal=False, implementation="cudnn", **told, **options) ** 2.0)

    rows = [(SEQ, HEADS), *[(SEQ // 2, KV_HEADS)] * 2]
    shapes = [jax.ShapeDtypeStruct((BATCH, *of, HEAD_DIM), jnp.bfloat16) for of in rows]
    told = dict.fromkeys(("lengths", "key_lengths"), jax.ShapeDtypeStruct((BATCH,), jnp.int32))
    gradients = jax.jit(jax.grad(loss, argnums=(1, 2, 3)))
    operands = (h200.shapes(of, h200.on_mesh(mesh, *spec)) for of in shapes)
    return h200.compile(gradients, h200.shapes(told, h200.on_mesh(mesh)), *operands)


def masks(program) -> list[str]:
    """The mask that each of cuDNN's calls takes."""
    calls = [line for line in program.hlo.splitlines() if re.search(r'custom_call_target="__cudnn\$fmha\w*Bias', line)]
    return [
        shape for call in calls for shape in re.findall(rf"bf16\[\d+,1,{SEQ},{SEQ}\]", call.split("custom-call(")[1])
    ]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_every_device_masks_its_own_documents(kind):
    mesh = h200.mesh(kind, data=2, tensor=2)
    own = [f"bf16[{BATCH // 2},1,{SEQ},{SEQ}]"] * 2  # forward, backward
    assert masks(compiled(mesh, P("data", None, "tensor"))) == own
    assert masks(compiled(mesh, P("data"), ("data",))) == own


def test_without_the_tie_devices_would_have_the_mask_of_all(monkeypatch):
    """A negative control: then cuDNN's operands do not fit."""
    monkeypatch.setattr(attention_op, "tied", lambda kv_heads, *operands: operands)
    found = masks(compiled(h200.mesh(data=2, tensor=2), P("data", None, "tensor")))
    assert found != [f"bf16[{BATCH // 2},1,{SEQ},{SEQ}]"] * 2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_lengths_are_cudnns(kind):
    """Each device's own, and no mask; of queries and of keys of another sequence."""
    hlo = padded(h200.mesh(kind, data=2, tensor=2), P("data", None, "tensor")).hlo
    calls = [line for line in hlo.splitlines() if 'custom_call_target="__cudnn$fmha' in line]
    assert len(calls) == 2 and all('"mask_type": "PADDING"' in call for call in calls)
    assert [re.findall(r"s32\[(\d+)\]", call) for call in calls] == [[f"{BATCH // 2}"] * 2] * 2
    assert f"[{BATCH // 2},1,{SEQ},{SEQ // 2}]" not in hlo


def test_a_window_is_cudnns():
    windows = re.findall(r'"?sliding_window_length"?: (\d+)', compiled(h200.mesh(data=1), P(), window=100).hlo)
    assert windows == ["100", "100"]
