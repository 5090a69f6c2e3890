"""A whole training step of a small GPT, compiled for four H200s on every kind of mesh, with cuDNN's attention:
that it compiles at all, and what goes over the wire.
"""

from functools import partial

import h200
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.core.paths import map_with_names
from jax_fp8.kernels import extension

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

DEVICES, BATCH, SEQ, WIDTH, VOCAB = 4, 8, 128, 256, 1024
TOKENS = BATCH // DEVICES * SEQ  # of a device, where the batch is split
COLUMNS, ROWS = ("query", "key", "value", "up", "gate"), ("out", "down")


@pytest.fixture(autouse=True)
def with_cudnn(monkeypatch, traced_anew):
    """As on a machine with a GPU, whose cuDNN answers when its version is asked for."""
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    attention = jax.nn.dot_product_attention

    def by_cudnn(*operands, implementation=None, **options):
        assert implementation in ("cudnn", "xla")
        return attention(*operands, implementation="cudnn", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_cudnn)


def gpt(**options) -> fp8.GPT:
    config = fp8.GPTConfig(
        vocab_size=VOCAB, num_layers=2, num_heads=8, hidden_size=WIDTH, max_seq_len=SEQ,
        norm="rmsnorm", activation="swiglu", use_bias=False, **options,
    )  # fmt: skip
    return fp8.GPT(config)
