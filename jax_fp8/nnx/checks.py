"""Checks of the arguments and inputs of NNX layers, before anything is computed."""

from collections.abc import Mapping

import jax
from flax.typing import Dtype

from jax_fp8.core.checks import check_flags, check_integer, check_number, describe, is_array
from jax_fp8.core.lora import Lora, check_lora
from jax_fp8.core.recipe import Recipe, check_recipe
from jax_fp8.nn.checks import check_dtype
from jax_fp8.ops.layer_gemm import check_multiples_of_16


def check_fields(
    layer: str,
    sizes: Mapping[str, int],
    recipe: Recipe | None,
    dtype: Dtype | None,
    param_dtype: Dtype,
    epsilon: float = 0.0,
    **flags: bool,
) -> None:
    """Raise unless these arguments of a layer are valid; `sizes` are rows and columns of its kernel, by name."""
    for name, size in sizes.items():
        check_integer(f"{layer}: {name}", size)
    check_recipe(recipe)
    if recipe is not None:
        rows, columns = sizes.values()
        check_multiples_of_16(layer, rows, (columns,))
    if dtype is not None:
        check_dtype(f"{layer}: dtype", dtype)
    check_dtype(f"{layer}: param_dtype", param_dtype)
    check_number(f"{layer}: epsilon", epsilon, "that is not negative", lambda epsilon: epsilon >= 0)
    check_flags(**{f"{layer}: {name}": flag for name, flag in flags.items()})


def check_sharding(layer: str, out_sharding: object) -> None:
    """Raise where the caller asks for a sharding of the result."""
    if out_sharding is not None:
        raise ValueError(
            f"{layer}: out_sharding must be None where the product is in FP8, got {out_sharding!r}; use jax.reshard on "
            "the result"
        )


def check_input(layer: str, x: jax.Array, features: int) -> None:
    """Raise unless this is an array with so many features."""
    if not is_array(x) or not x.ndim or x.shape[-1] != features or not x.size:
        raise ValueError(f"{layer} needs an array whose last dim is {features}, got {describe(x)}; reshape or cast it")


def check_has_no_targets(layer: str, lora: Lora | None) -> None:
    """Raise where a layer that does not know its name gets the names of layers."""
    check_lora(layer, lora)
    if lora is not None and lora.targets is not None:
        raise ValueError(
            f"{layer}: a layer does not know its name in the model, so its lora must have no targets, got "
            f"{lora.targets}; leave targets out, and lora out of layers without an adapter"
        )
