"""Checks of a layer's fields and of its input. They run first, so that a bad value is reported by its name."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jax_fp8.core.checks import check_bool, check_integer, check_number, describe, is_array
from jax_fp8.core.lora import check_lora
from jax_fp8.core.shards import SplitDim, TensorParallel, split_dim_of

FLAGS = (
    "use_bias",
    "use_qkv_bias",
    "qk_norm",
    "causal",
    "rotary",
    "residual",
    "return_input",
    "recompute",
    "logical_axes",
    "normalize_router_weights",
    "router_correction_bias",
    "gate_shared_expert",
    "fp8_attention",
    "zero_centered_scale",
)


def check_segment_ids(owner: str, segment_ids: jax.Array, shape: tuple[int, ...]) -> None:
    """Raise unless these are integers of this shape; `owner` is the layer or input that messages name."""
    is_integer = is_array(segment_ids) and jnp.issubdtype(segment_ids.dtype, jnp.integer)
    if not is_integer or segment_ids.shape != shape:
        raise ValueError(
            f"{owner}: segment_ids must be an integer array {shape}, for each token the number of its document, "
            f"got {describe(segment_ids)}; cast or reshape it"
        )


def check_lengths(owner: str, lengths: jax.Array, shape: tuple[int, ...]) -> None:
    """Raise unless these are integers of this shape, one for each sequence; `owner` as in `check_segment_ids`."""
    is_integer = is_array(lengths) and jnp.issubdtype(lengths.dtype, jnp.integer)
    if not is_integer or lengths.shape != shape:
        raise ValueError(
            f"{owner}: lengths must be an integer array {shape}, for each sequence the number of tokens before its "
            f"padding, got {describe(lengths)}; cast or reshape it"
        )


def check_padding(owner: str, segment_ids: jax.Array | None, lengths: jax.Array | None, shape: tuple[int, ...]) -> None:
    """Raise unless at most one of both is there, and fits tokens of this shape (batch, seq)."""
    if segment_ids is not None:
        check_segment_ids(owner, segment_ids, shape)
    if lengths is not None:
        check_lengths(owner, lengths, shape[:-1])
    if segment_ids is not None and lengths is not None:
        raise ValueError(
            f"{owner}: padding must be marked by segment_ids or by lengths, got both; leave lengths out, and give "
            "padding a number of its own among the segment_ids"
        )


def check_context(module: nn.Module, x: jax.Array, context: jax.Array) -> None:
    """Raise unless `x` can attend to `context`."""
    _check_input(f"{layer_name(module)}, context", context, (x.ndim,))
    if context.shape[:-2] != x.shape[:-2]:
        raise ValueError(
            f"{layer_name(module)}: x and context must have equally many sequences, got {describe(x)} and "
            f"{describe(context)}; repeat those of one"
        )


def check_layer(module: nn.Module, x: jax.Array, sizes: tuple[str, ...], dims: tuple[int, ...] = ()) -> None:
    """Raise unless the layer's fields are valid and it can take this input.

    Args:
      sizes: fields that are positive integers, or None where None is their default.
      dims: how many dims the input may have; empty allows any number from 1 on.
    """
    layer, fields = layer_name(module), vars(module)
    for name in sizes:
        if fields[name] is not None or getattr(type(module), name, ...) is not None:
            check_integer(f"{layer}: {name}", fields[name])
    for name in FLAGS:
        if name in fields and not (name == "use_qkv_bias" and fields[name] is None):
            check_bool(f"{layer}: {name}", fields[name])
    if "epsilon" in fields:
        check_number(f"{layer}: epsilon", fields["epsilon"], "that is not negative", lambda epsilon: epsilon >= 0)
    for name in ("dtype", "param_dtype"):
        check_dtype(f"{layer}: {name}", fields[name])
    for name in ("kernel_init", "bias_init"):
        if not callable(fields[name]):
            raise ValueError(
                f"{layer}: {name} must be an initializer, got {fields[name]!r}; see flax.linen.initializers"
            )
    check_lora(layer, fields["lora"])
    _check_input(layer, x, dims)


def own_product(layer: object) -> list[str]:
    """The fields by which a layer of Flax, Linen or NNX, has a product of its own: those that are not as by default."""
    defaults = {
        "precision": (None, "default", lax.Precision.DEFAULT),
        "dot_general": (None, lax.dot_general),
        "dot_general_cls": (None,),
    }
    return [name for name, values in defaults.items() if getattr(layer, name, None) not in values]


def check_has_no_own_product(module: nn.Module) -> None:
    """Raise unless the layer's fields leave the product to the layer."""
    for name in own_product(module):
        raise ValueError(
            f"{layer_name(module)}: {name} must be None, since this layer multiplies by its own GEMM, got "
            f"{getattr(module, name)!r}; leave it out, or use flax.linen.Dense here"
        )


def layer_name(module: nn.Module) -> str:
    """The path of a layer in its model; for a layer that is itself the model, the name of its class."""
    return "/".join(module.path) or type(module).__name__


def check_tensor_split(module: nn.Module, split: SplitDim | None, sides: tuple[SplitDim, ...]) -> None:
    """Raise unless this is None or one of the sides that the layer can split."""
    if split is not None and split not in sides:
        wanted = " or ".join(["None", *(f'"{name}"' for name in sides)])
        raise ValueError(f"{layer_name(module)}: tensor_split must be {wanted}, got {split!r}")


def check_is_split(name: str, parts: int, tensor: TensorParallel | None) -> None:
    """Raise unless a param is split over all devices of `tensor`; `parts` says over how many it is split."""
    if tensor is not None and parts != tensor.size:
        raise ValueError(
            f"{name} must be split over {tensor.axis}={tensor.size}, but is whole on every device; "
            "leave it out of the rules of make_train_step"
        )


def check_are_split_alike(module: nn.Module, names: Sequence[str]) -> None:
    """Raise unless these sublayers of `module`, whose kernels one GEMM multiplies by, are all split alike."""
    sides = {name: split_dim_of((*module.path, name, "kernel")) for name in names}
    if len(set(sides.values())) > 1:
        arrived = " and ".join(
            f"{name} {f'split by {split_dim}' if split_dim else 'whole'}" for name, split_dim in sides.items()
        )
        raise ValueError(
            f"{layer_name(module)}: kernels that one GEMM multiplies by must be split alike, got {arrived}; "
            "let the rules name all of them, or none"
        )


def check_dtype(name: str, dtype: jax.typing.DTypeLike | None) -> None:
    """Raise unless layers can compute in this dtype and keep params in it."""
    try:
        numpy_dtype = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        numpy_dtype = None
    if numpy_dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(f"{name} must be jnp.bfloat16, jnp.float16 or jnp.float32, got {dtype!r}")


def _check_input(layer: str, x: jax.Array, dims: tuple[int, ...]) -> None:
    if not is_array(x):
        raise ValueError(
            f"{layer} needs an array, got {describe(x)}; pass jnp.asarray(x), or the dequantize() of an Fp8Array"
        )
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ValueError(f"{layer} needs real numbers, got {describe(x)}; pass real and imaginary parts side by side")
    if not x.ndim or (dims and x.ndim not in dims):
        wanted = " or ".join(map(str, dims)) or "at least 1"
        raise ValueError(f"{layer} needs an array of {wanted} dims, got {describe(x)}; reshape it")
    if not x.size:
        raise ValueError(f"{layer} needs at least one row and one feature, got {describe(x)}; leave empty batches out")
