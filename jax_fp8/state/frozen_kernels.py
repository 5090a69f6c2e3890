"""Kernels that are frozen in FP8, one byte each, and adapters merged into them.

    variables ─freeze_kernels→ variables without these kernels, and the collection "fp8_frozen" ─merge_adapters→ params

core/frozen.py says what a frozen weight is, ops/adapters.py what an adapter is.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8.core.checks import check_bool, describe
from jax_fp8.core.fp8_array import Fp8Array, Fp8Pair
from jax_fp8.core.frozen import FROZEN
from jax_fp8.core.lora import LORA_A, LORA_B, Lora
from jax_fp8.core.paths import LayerPath, at_path, is_of_experts, kernel_paths, put_at_path
from jax_fp8.core.recipe_rules import RecipeOrRules, step_recipe
from jax_fp8.core.types import PyTree, Variables
from jax_fp8.ops.weights import cast_gemms, transpose_alone
from jax_fp8.parallel.names import without_names
from jax_fp8.state.checks import check_variables
from jax_fp8.state.weight_cache import check_can_be_cast, gemms_of_recipe


def freeze_kernels(
    variables: Variables,
    recipe: RecipeOrRules,
    params: Mapping | None = None,
    *,
    forward: Callable[[dict], object] | None = None,
    apart: bool = False,
) -> dict[str, PyTree]:
    """Freeze the kernels of all FP8 GEMMs: cast them to FP8 once, and take them out of the params.

    A frozen kernel takes one byte an element. It has no gradient, no master and no moments. Train adapters (`Lora`) in
    its place, or the params that are left. Each kernel is scaled by its own amax. Kernels of experts stay params.

    Args:
      variables: "params", and "fp8" where the recipe has state, as `model.init` returned them.
      recipe: the model's. None freezes nothing, and only takes `params`. Of rules, kernels stay params that have
        another recipe than that of a step.
      params: loaded params, of any float dtype, on the device or the host. They replace those of `variables` at the
        same paths. `variables` may have more, such as adapters.
      forward: a function of the variables that runs the model, `lambda variables: model.apply(variables, x)`. Only a
        recipe without state needs it, as in `cast_weights`.
      apart: store each kernel in an array of its own, as a mesh with the axis `tensor` needs it. By default the kernels
        of one GEMM, such as query, key and value, are side by side. Apart, a step copies some of them: about 1 % of its
        time.

    Returns:
      The variables. "fp8_frozen" has, for each GEMM or each layer, an `Fp8Pair` with the transpose of its kernels.

    Raises:
      ValueError: if `variables` and `recipe` are not of one model, `params` has a path or a shape that `variables` does
        not have, `forward` is missing, or kernels that are to be apart share a tile with one scale.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> layer, x = fp8.Dense(32, lora=fp8.Lora(rank=4)), jnp.ones((16, 64))
      >>> variables = fp8.freeze_kernels(layer.init(jax.random.key(0), x), layer.recipe)
      >>> sorted(variables["params"]), variables["fp8_frozen"]["kernel"].columnwise.shape
      (['bias', 'lora_a', 'lora_b'], (32, 64))
      >>> layer.apply(variables, x).shape
      (16, 32)
    """
    check_variables(variables)
    recipe = step_recipe(recipe)
    check_bool("apart", apart)
    variables = without_names(variables)
    if params is not None:
        variables = {**variables, "params": _with_loaded(variables["params"], params, ())}
    if recipe is None:
        return dict(variables)
    check_can_be_cast("freeze_kernels", variables, recipe)
    found = gemms_of_recipe(variables, recipe, None, forward)
    gemms = [gemm for gemm in found if kernel_paths(gemm) and not is_of_experts(gemm)]
    then = dict.fromkeys(gemms, transpose_alone)
    frozen = cast_gemms(variables["params"], {}, dict.fromkeys(gemms, recipe), then)
    if apart:
        frozen = _apart(frozen, gemms, variables["params"])
    kernels = {kernel for gemm in gemms for kernel in kernel_paths(gemm)}
    left = _without(variables["params"], kernels, ())
    return {**variables, "params": left, FROZEN: {**variables.get(FROZEN, {}), **frozen}}


def _apart(frozen: Mapping, gemms: Sequence[LayerPath], params: Mapping) -> dict[str, PyTree]:
    """Frozen weights with an array for each kernel."""
    found: dict[str, PyTree] = {}
    for gemm in gemms:
        pair, kernels = at_path(frozen, (*gemm, "kernel")), kernel_paths(gemm)
        widths = [at_path(params, kernel).shape[-1] for kernel in kernels]
        for kernel, part in zip(kernels, _rows(gemm, pair.columnwise, widths), strict=True):
            put_at_path(found, kernel[:-1], {"kernel": Fp8Pair(None, part, pair.amax)})
    return found


def _rows(gemm: LayerPath, transposed: Fp8Array, widths: Sequence[int]) -> list[Fp8Array]:
    """So many rows each of an array (..., n, k), with their scales."""
    ends = np.cumsum(widths)
    values = jnp.split(transposed.values, ends[:-1], axis=-2)
    scale = transposed.scale
    if scale.ndim < 2:  # one for the whole, or one for each stacked layer
        return [Fp8Array(part, scale) for part in values]
    tile = transposed.granularity
    if any(end % tile[-2] for end in ends[:-1]):
        raise ValueError(
            f"{'/'.join(gemm)}: kernels that are apart must not share a tile of {tile[-2]} columns, which has one "
            f"scale, got kernels of {', '.join(map(str, widths))} columns; choose other widths, or a recipe with one "
            "scale a tensor"
        )
    scales = jnp.split(scale, ends[:-1] // tile[-2], axis=-2)
    return [Fp8Array(*each, tile=transposed.tile) for each in zip(values, scales, strict=True)]


def merge_adapters(variables: Variables, lora: Lora, like: PyTree) -> dict[str, PyTree]:
    """Merge adapters into their kernels: `kernel + (alpha / rank) · a · b`, in float32, rounded once.

    Args:
      variables: with adapters among the params; kernels are params, or frozen.
      lora: the model's.
      like: the params of the model without adapters, or their shapes, as `jax.eval_shape(model.init, ...)["params"]`.

    Returns:
      Params like `like`, of its dtypes. Frozen kernels are dequantized.

    Raises:
      ValueError: if a param of `like` is neither among the params nor frozen.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> lora, x = fp8.Lora(rank=4), jnp.ones((16, 64))
      >>> plain, layer = fp8.Dense(32), fp8.Dense(32, lora=lora)
      >>> variables = fp8.freeze_kernels(layer.init(jax.random.key(0), x), layer.recipe)
      >>> like = jax.eval_shape(plain.init, jax.random.key(0), x)["params"]
      >>> jax.tree.map(jnp.shape, fp8.merge_adapters(variables, lora, like))
      {'bias': (32,), 'kernel': (64, 32)}
    """
    check_variables(variables)
    params = without_names(variables)["params"]
    thawed = _thawed(variables.get(FROZEN, {}), like, ())

    def merged(path: tuple, shape: Any) -> jax.Array:
        names = tuple(key.key for key in path)
        array = at_path(params, names)
        array = at_path(thawed, names) if array is None else array
        if array is None or jnp.shape(array) != tuple(shape.shape):
            raise ValueError(
                f"variables must hold the param {'/'.join(names)} of shape {tuple(shape.shape)}, or its kernel frozen, "
                f"got {describe(array)}; pass the variables and the params' shapes of one model"
            )
        layer = at_path(params, names[:-1]) if names[-1] == "kernel" else None
        if isinstance(layer, Mapping) and LORA_A in layer:
            return merged_kernel(jnp.asarray(array), layer[LORA_A], layer[LORA_B], lora.scaling, shape.dtype)
        return jnp.asarray(array).astype(shape.dtype)

    return jax.tree_util.tree_map_with_path(merged, like)


def _on_every_device(array: jax.Array) -> jax.Array:
    """The whole matrix: a sum over the rank in parts would be rounded in another way."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return array
    return jax.jit(lambda x: x, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))(array)


def merged_kernel(
    kernel: jax.Array, a: jax.Array, b: jax.Array, scaling: float, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """`kernel + scaling · a · b` in float32, rounded once to `dtype`."""
    return _merge(*map(_on_every_device, (kernel, a, b)), scaling, np.dtype(dtype))


@partial(jax.jit, static_argnames=("scaling", "dtype"))
def _merge(kernel: jax.Array, a: jax.Array, b: jax.Array, scaling: float, dtype: np.dtype) -> jax.Array:
    product = jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
    return (kernel.astype(jnp.float32) + scaling * product).astype(dtype)


def thawed_kernels(frozen: Fp8Pair, widths: Sequence[int]) -> list[jax.Array]:
    """The kernels (..., k, n_i) of a frozen weight, in float32."""
    assert frozen.columnwise is not None, "what a frozen weight keeps"
    whole = jnp.swapaxes(frozen.columnwise.dequantize(), -1, -2)
    return jnp.split(whole, np.cumsum(widths)[:-1], axis=-1)


def _thawed(node: PyTree, like: PyTree, path: LayerPath) -> dict[str, PyTree]:
    """The kernels of frozen weights as params, in float32, cut by the shapes in `like`."""
    params: dict[str, PyTree] = {}
    for name, child in node.items() if isinstance(node, Mapping) else ():
        if isinstance(child, Fp8Pair):
            kernels = kernel_paths(path)
            parts = thawed_kernels(child, [at_path(like, kernel).shape[-1] for kernel in kernels])
            for kernel, part in zip(kernels, parts, strict=True):
                put_at_path(params, kernel[:-1], {kernel[-1]: part})
        else:
            _join(params, _thawed(child, like, (*path, name)))
    return params


def _join(into: dict[str, PyTree], tree: Mapping) -> None:
    for name, child in tree.items():
        if isinstance(child, Mapping):
            _join(into.setdefault(name, {}), child)
        else:
            into[name] = child


def _with_loaded(own: PyTree, loaded: PyTree, path: Sequence[str]) -> PyTree:
    """`own` with the params of `loaded` in place of those at the same paths."""
    if isinstance(loaded, Mapping) and isinstance(own, Mapping):
        unknown = sorted(set(loaded) - set(own))
        if unknown:
            raise ValueError(
                f"params must be of this model, got {'/'.join([*path, unknown[0]])}, which it does not have; pass the "
                "params of a model with this config"
            )
        return {
            name: _with_loaded(child, loaded[name], [*path, name]) if name in loaded else child
            for name, child in own.items()
        }
    if isinstance(loaded, Mapping) or isinstance(own, Mapping) or jnp.shape(own) != jnp.shape(loaded):
        raise ValueError(
            f"params must have the shapes of this model, got {describe(loaded)} for {'/'.join(path)}, which is "
            f"{describe(own)}; pass the params of a model with this config"
        )
    return loaded


def _without(node: PyTree, kernels: set[LayerPath], path: LayerPath) -> PyTree:
    if not isinstance(node, Mapping):
        return node
    return {
        name: _without(child, kernels, (*path, name)) for name, child in node.items() if (*path, name) not in kernels
    }
