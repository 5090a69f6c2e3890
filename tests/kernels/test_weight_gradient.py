"""The gradient of a weight against float64: alone, added to a total, of shards; and where a kernel runs, in place."""

import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fp8.kernels import extension
from jax_fp8.kernels.weight_gradient import TARGET, after, weight_gradient

BATCH, SEQ, N, K = 4, 6, 48, 32
REASON = h200.missing_reason() or extension.missing_reason()


def inputs(dtype=jnp.bfloat16, n=N):
    keys = jax.random.split(jax.random.key(0), 3)
    dy, x = (jax.random.normal(key, (BATCH, SEQ, dim)).astype(dtype) for key, dim in zip(keys, (n, K), strict=False))
    return dy, x, jax.random.normal(keys[2], (n, K))


def expected(dy, x, total=None):
    dy, x = (np.asarray(array).astype(np.float64).reshape(BATCH * SEQ, -1) for array in (dy, x))
    return dy.T @ x + (0 if total is None else np.asarray(total, np.float64))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_against_float64(dtype):
    dy, x, total = inputs(dtype)
    alone, added = jax.jit(weight_gradient)(dy, x), jax.jit(weight_gradient)(dy, x, total)
    assert alone.dtype == added.dtype == jnp.float32
    reference.assert_close(alone, expected(dy, x), "float32")
    reference.assert_close(added, expected(dy, x, total), "float32")
    for wrong in (alone, added - alone):
        with pytest.raises(AssertionError, match="relative error"):
            reference.assert_close(wrong, expected(dy, x, total), "float32")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("splits", [("data", None), (None, "data"), (None, None)])
def test_shards_of_batch_and_sequence(splits, axis_type):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    dy, x, total = inputs()
    tokens, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((*splits, None), ()))
    with jax.set_mesh(mesh):
        placed = jax.device_put(dy, tokens), jax.device_put(x, tokens), jax.device_put(total, whole)
        got = jax.jit(weight_gradient)(*placed)
    reference.assert_close(got, expected(dy, x, total), "float32")


def calls(*arrays) -> str:
    """The lines of the custom calls in the program for a GPU."""
    text = jax.jit(weight_gradient).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return "\n".join(line for line in text.splitlines() if f"@{TARGET}(" in line)


def test_the_custom_call(with_kernels):
    """One, of operands as they lie, over the total; none for float32, or where rows are not made of 16 bytes."""
    dy, x, total = inputs()
    line = calls(dy, x, total)
    assert line.count(TARGET) == 1 and "output_operand_alias" in line
    assert "tensor<24x48xbf16>, tensor<24x32xbf16>, tensor<48x32xf32>" in line
    alone = calls(dy, x)
    assert alone.count(TARGET) == 1 and "output_operand_alias" not in alone
    assert not calls(*inputs(jnp.float32))
    assert not calls(*inputs(n=44))


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("total", [True, False])
def test_the_gpu_compiler_adds_in_place(total):
    arrays = h200.shapes(inputs()[: 2 + total], h200.on_one_device())
    step = jax.jit(weight_gradient, donate_argnums=2 if total else ())
    program = h200.compile(step, *arrays, xla_gpu_graph_min_graph_size=1)
    assert program.custom_calls == {TARGET: 1} and program.graphs == 1 and not program.copies
    assert program.aliased_bytes == (4 * N * K if total else 0)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", [(BATCH, SEQ, N), (BATCH * SEQ, N)])
def test_what_comes_after_is_what_was_there(shape, axis_type):
    dy, _, total = inputs()
    dy = dy.reshape(shape)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        split = jax.jit(after)(total, jax.device_put(dy, NamedSharding(mesh, PartitionSpec("data"))))
    for pair in (jax.jit(after)(total, dy), split):
        for ours, given in zip(pair, (total, dy), strict=True):
            np.testing.assert_array_equal(ours, given)


def test_errors():
    dy, x, total = inputs()
    with pytest.raises(ValueError, match=r"weight_gradient needs dy \(batch, seq, n\) and x \(batch, seq, k\)"):
        weight_gradient(dy, x[:, 1:])
    with pytest.raises(ValueError, match="of one dtype, got bfloat16"):
        weight_gradient(dy, x.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"total must be float32\(48, 32\), got float32\(32, 48\); cast or transpose"):
        weight_gradient(dy, x, total.T)
    with pytest.raises(ValueError, match=r"total must be float32\(48, 32\), got bfloat16"):
        weight_gradient(dy, x, total.astype(jnp.bfloat16))
