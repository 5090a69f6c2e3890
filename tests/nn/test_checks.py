"""What layers refuse: sizes, flags and dtypes that make no sense, and inputs that they cannot take."""

from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.core.shards import Shards, TensorParallel
from jax_fp8.nn.checks import check_are_split_alike, check_dtype

pytestmark = pytest.mark.versions

RECIPE = fp8.CurrentScaling()
MATRIX, SEQUENCES = jnp.ones((16, 32)), jnp.ones((2, 16, 32))


def init(layer, x=MATRIX, *others):
    """Traced as `init` runs it, by either way: with FP8 and without, a layer says the same."""
    for recipe in (RECIPE, None):
        jax.eval_shape(layer.clone(recipe=recipe).init, jax.random.key(0), x, *others)


LAYERS = {
    "features": (lambda size: fp8.Dense(size), MATRIX),
    "norm features": (lambda size: fp8.LayerNormDense(size), MATRIX),
    "hidden_features": (lambda size: fp8.LayerNormMLP(size), MATRIX),
    "num_heads": (lambda size: fp8.SelfAttention(size), SEQUENCES),
    "num_kv_heads": (lambda size: fp8.SelfAttention(2, size), SEQUENCES),
    "head_dim": (lambda size: fp8.SelfAttention(2, head_dim=size), SEQUENCES),
    "block num_heads": (lambda size: fp8.TransformerBlock(size, 32), SEQUENCES),
    "mlp_hidden_features": (lambda size: fp8.TransformerBlock(2, size), SEQUENCES),
}


@pytest.mark.parametrize("size", ["64", -16, 0, 64.0, True, (16,)], ids=repr)
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_no_size(name, size):
    make, x = LAYERS[name]
    with pytest.raises(ValueError, match=f": {name.split()[-1]} must be an integer of at least 1, got "):
        jax.eval_shape(make(size).clone(recipe=None).init, jax.random.key(0), x)


@pytest.mark.parametrize("name", LAYERS)
def test_sizes_of_numpy_pass(name):
    make, x = LAYERS[name]
    init(make(np.int64(16) if name != "num_kv_heads" else np.int64(2)), x)


def test_none_where_it_is_no_default():
    for layer, name in ((fp8.Dense(None), "features"), (fp8.SelfAttention(None), "num_heads")):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got None"):
            init(layer, SEQUENCES)


@pytest.mark.parametrize(
    ("layer", "x", "message"),
    [
        (fp8.Dense(16, "bfloat16"), MATRIX, "Dense: use_bias must be True or False, got 'bfloat16'"),
        (fp8.SelfAttention(2, causal="no"), SEQUENCES, "SelfAttention: causal must be True or False, got 'no'"),
        (
            fp8.LayerNormDense(16, epsilon=-1.0),
            MATRIX,
            "epsilon must be a finite number that is not negative, got -1.0",
        ),
        (fp8.Dense(16, dtype="bf16"), MATRIX, "Dense: dtype must be jnp.bfloat16, .*, got 'bf16'"),
        (fp8.Dense(16, dtype=fp8.E4M3), MATRIX, "Dense: dtype must be jnp.bfloat16, .*, got <class"),
        (fp8.Dense(16, param_dtype=jnp.int32), MATRIX, "Dense: param_dtype must be jnp.bfloat16, .*, got <class"),
        (
            fp8.Dense(16, kernel_init="zeros"),
            MATRIX,
            "Dense: kernel_init must be an initializer, got 'zeros'; see flax",
        ),
        (fp8.Dense(16, tensor_split="out"), MATRIX, """tensor_split must be None or "columns" or "rows", got 'out'"""),
        (fp8.LayerNormDense(16, tensor_split="rows"), MATRIX, """tensor_split must be None or "columns", got 'rows'"""),
        (fp8.Dense(16), jnp.float32(1), r"Dense needs an array of at least 1 dims, got float32\[\]; reshape"),
        (fp8.Dense(16), jnp.ones((4, 16), jnp.complex64), r"Dense needs real numbers, got complex64\[4, 16\]; pass"),
        (fp8.SelfAttention(2), SEQUENCES[None], r"SelfAttention needs an array of 2 or 3 dims, .*\[1, 2, 16, 32\]"),
        (fp8.SelfAttention(2), MATRIX[0], r"SelfAttention needs an array of 2 or 3 dims, got float32\[32\]"),
        (fp8.TransformerBlock(2, 32), SEQUENCES[None], "TransformerBlock needs an array of 2 or 3 dims"),
        (fp8.SelfAttention(2, implementation="flash"), SEQUENCES, 'implementation must be "cudnn", "xla" or None, got'),
        (fp8.SelfAttention(16, head_dim=3, rotary=True), SEQUENCES, "need an even head_dim, got 3; change num_heads"),
        (fp8.SelfAttention(32, rotary=True), SEQUENCES, "need an even head_dim, got 1; change num_heads"),
    ],
)
def test_fields_and_inputs(layer, x, message):
    with pytest.raises(ValueError, match=message):
        init(layer, x)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([[1.0] * 32], "Dense needs an array, got a list; pass jnp.asarray"),
        (
            fp8.Fp8Array(MATRIX.astype(fp8.E4M3), jnp.float32(1)),
            r"Dense needs an array, got a Fp8Array .*\[16, 32\]; .* dequantize\(\)",
        ),
    ],
    ids=["list", "Fp8Array"],
)
def test_what_is_no_array(x, message):
    with pytest.raises(ValueError, match=message):
        fp8.Dense(16, recipe=None).init(jax.random.key(0), x)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (fp8.Dense(16), (0, 32)),
        (fp8.Dense(16), (0, 16, 32)),
        (fp8.LayerNormDense(16), (16, 0)),
        (fp8.LayerNormMLP(16), (0, 32)),
        (fp8.SelfAttention(2), (0, 16, 32)),
        (fp8.TransformerBlock(2, 32), (2, 0, 32)),
    ],
)
def test_empty_batches(layer, shape):
    with pytest.raises(
        ValueError, match=r"needs at least one row and one feature, got float32.*; leave empty batches out"
    ):
        init(layer, jnp.ones(shape))


@pytest.mark.parametrize("shape", [(16,), (), (8, 16), (16, 32), (2, 8, 16), (1, 16)])
@pytest.mark.parametrize("recipe", [RECIPE, None], ids=["fp8", "bf16"])
def test_a_residual_has_the_shape_of_the_result(recipe, shape):
    """The reference broadcast it, or reshaped it; a kernel would have read beyond it."""
    layer = fp8.Dense(16, recipe=recipe)
    with pytest.raises(ValueError, match=r"residual must have the shape of the result, \(16, 16\), got .*; reshape or"):
        jax.eval_shape(layer.init, jax.random.key(0), MATRIX, jnp.ones(shape))
    jax.eval_shape(layer.init, jax.random.key(0), MATRIX, jnp.ones((16, 16)))


def own_general(*operands, **options):
    return jax.lax.dot_general(*operands, **options)


@pytest.mark.parametrize(
    "field",
    [
        {"precision": "highest"},
        {"precision": jax.lax.Precision.HIGH},
        {"dot_general": own_general},
        {"dot_general_cls": fp8.DotGeneral},
    ],
    ids=["precision", "high precision", "dot_general", "dot_general_cls"],
)
def test_a_product_of_ones_own_is_refused(field):
    """As a drop-in for `nn.Dense`, `Dense` has its fields; by their defaults it is the same layer."""
    (name,) = field
    with pytest.raises(ValueError, match=f"^Dense: {name} must be None, since .*; leave it out, or use flax.linen"):
        init(fp8.Dense(16, **field), MATRIX)
    defaults = {"precision": "default", "dot_general": jax.lax.dot_general, "dot_general_cls": None}
    init(fp8.Dense(16, **{name: defaults[name]}), MATRIX)


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
def test_a_dtype_that_layers_cannot_compute_in_is_refused_with_the_layer(name):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return fp8.Dense(16, name="up", **{name: jnp.float64})(x)

    with pytest.raises(ValueError, match=f"^up: {name} must be jnp.bfloat16, jnp.float16 or jnp.float32, got .*64"):
        jax.eval_shape(Model().init, jax.random.key(0), MATRIX)


def test_dtypes():
    for dtype in (jnp.bfloat16, "float16", np.float32, jnp.dtype("bfloat16")):
        check_dtype("dtype", dtype)
    for dtype in (None, fp8.E5M2, int, "bf16", 16, jnp.float64, "float64", jnp.complex64):
        with pytest.raises(ValueError, match=r"^dtype must be jnp.bfloat16, jnp.float16 or jnp.float32, got "):
            check_dtype("dtype", dtype)


@pytest.mark.parametrize("split", [(-1, -1), (None, None), (-1, None), (None, -1)], ids=str)
def test_kernels_of_one_gemm_are_split_alike(split):
    """Heads of keys may be whole where those of queries are not; the halves of a gated MLP may not."""
    dims = {(name, "kernel"): dim for name, dim in zip(("gate", "up"), split, strict=True)}
    module: Any = SimpleNamespace(path=())
    with Shards((), TensorParallel("tensor", 2), dims, 1).active():
        if split[0] == split[1]:
            check_are_split_alike(module, ("gate", "up"))
            return
        found = "gate split by columns and up whole" if split[0] else "gate whole and up split by columns"
        with pytest.raises(
            ValueError, match=f"SimpleNamespace: kernels that one GEMM .* alike, got {found}; let the rules name"
        ):
            check_are_split_alike(module, ("gate", "up"))
