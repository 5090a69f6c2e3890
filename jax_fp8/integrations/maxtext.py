"""MaxText: its own train loop with the products of this library, by its own command line.

    python -m jax_fp8.integrations.maxtext base.yml model_name=llama3-8b quantization=jax_fp8 [head=jax_fp8_current]

MaxText asks one object, its `Quantization`, for the product of each linear layer and of each einsum of experts. `use`
puts an object of ours there. The state of delayed scaling lies in "_overwrite_with_gradient", by which MaxText's train
step differentiates. Its gradient accumulation does not, so there `use` replaces the gradient function.

What is known here of MaxText: `layers.quantizations.configure_quantization` and `Fp8Quantization`, the classes
`layers.moe.GateLogit` and `RoutedMoE`, `utils.model_creation_utils.create_model`, that a model has its head at
`decoder.logits_dense`, and that `utils.gradient_accumulation` takes gradients by `nnx.value_and_grad`.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.nnx import variablelib
from jax import lax

from jax_fp8.core.recipe import BlockScaling, CurrentScaling, DelayedScaling, Recipe, check_recipe
from jax_fp8.core.types import PyTree
from jax_fp8.integrations.listing import Listing, why_not_sizes
from jax_fp8.integrations.modules import imported
from jax_fp8.nn.dot_general import DotGeneral, carried_state
from jax_fp8.ops.dot_general import DimensionNumbers, einsum_of
from jax_fp8.ops.einsum_dims import EinsumDims

RECIPES = {"jax_fp8": DelayedScaling, "jax_fp8_current": CurrentScaling, "jax_fp8_block": BlockScaling}
OPTION, HEAD_OPTION = "quantization=", "head="
# The value of `quantization` that stands for our products in MaxText's config. With "fp8" MaxText refuses to
# accumulate gradients, because its own histories would stay empty.
STANDS_FOR = "fp8_e4m3"
ROUTER = "the router, whose choices are discrete"
_IN_USE = SimpleNamespace(recipe=None, head=None, is_installed=False, was_listed=False)


def use(recipe: Recipe, head: Recipe | None = None) -> None:
    """Let MaxText compute by this recipe where its config says `quantization=fp8_e4m3`.

    Call it before `train.main`. The first model that MaxText then makes is listed: which of its products are in FP8,
    and which are left, and why. Routers, embeddings, heads and kernels of sizes that are no multiples of 16 are left.
    So are experts with `sparse_matmul=true`.

    Args:
      recipe: of all layers.
      head: of the head, if it has a kernel of its own; None leaves it in bfloat16, as MaxText does.

    Raises:
      ValueError: if `recipe` or `head` is not a recipe.
      ImportError: if MaxText is not installed.

    Example:
      >>> import jax_fp8 as fp8
      >>> from jax_fp8.integrations import maxtext
      >>> def launch(argv):
      ...     from maxtext.trainers.pre_train import train
      ...     maxtext.use(fp8.DelayedScaling(amax_history_len=64))
      ...     train.main(argv)  # with quantization=fp8_e4m3
      >>> launch.__name__
      'launch'
    """
    check_recipe(recipe)
    check_recipe(head)
    if recipe is None:
        raise ValueError("use needs a recipe, got None; leave quantization out of MaxText's config")
    hosts = {
        name: imported(f"maxtext.{name}", "maxtext")
        for name in (
            "layers.quantizations",
            "layers.moe",
            "utils.model_creation_utils",
            "utils.gradient_accumulation",
            "layers.linears",
            "layers.nnx_wrappers",
        )
    }
    _IN_USE.recipe, _IN_USE.head, _IN_USE.was_listed = recipe, head, False
    if not _IN_USE.is_installed:
        _install(*hosts.values())
        _IN_USE.is_installed = True


def main(argv: Sequence[str] | None = None) -> None:
    """Run MaxText's pre-training with its own arguments.

    Args:
      argv: MaxText's arguments after the name of the program, with `quantization=` "jax_fp8" (delayed scaling),
        "jax_fp8_current" or "jax_fp8_block", and perhaps `head=` one of these; None reads the command line.

    Raises:
      ValueError: if there is no such `quantization`, or another `head`.
      ImportError: if MaxText is not installed.

    Example:
      >>> from jax_fp8.integrations import maxtext
      >>> def launch():
      ...     maxtext.main(["base.yml", "model_name=llama3-8b", "quantization=jax_fp8", "run_name=first"])
      >>> launch.__name__
      'launch'
    """
    recipe, head, others = _read(sys.argv[1:] if argv is None else argv)
    train = imported("maxtext.trainers.pre_train.train", "maxtext")
    use(recipe, head)
    train.main(["", *others, f"{OPTION}{STANDS_FOR}"])


def _read(argv: Sequence[str]) -> tuple[Recipe, Recipe | None, list[str]]:
    """The recipes of layers and head that arguments ask for, and the other arguments."""
    layers, argv = _taken_out(argv, OPTION)
    head, argv = _taken_out(argv, HEAD_OPTION)
    names = ", ".join(RECIPES)
    if layers not in RECIPES:
        raise ValueError(
            f"{OPTION} must be one of {names}, got {layers or 'none'}; start MaxText's own program for others"
        )
    if head is not None and head not in RECIPES:
        raise ValueError(f"{HEAD_OPTION} must be one of {names}, got {head}; leave it out for bfloat16")
    return RECIPES[layers](), None if head is None else RECIPES[head](), argv


def _taken_out(argv: Sequence[str], option: str) -> tuple[str | None, list[str]]:
    """The last value of an option, or None, and the other arguments."""
    values = [each.removeprefix(option) for each in argv if each.startswith(option)]
    return (values or [None])[-1], [each for each in argv if not each.startswith(option)]


def listing(model: nnx.Module) -> Listing:
    """Which products of a MaxText model are in FP8, and which are left, and why.

    Args:
      model: made after `use`.

    Returns:
      Products by the paths of their layers.

    Example:
      >>> from flax import nnx
      >>> from jax_fp8.integrations import maxtext
      >>> print(maxtext.listing(nnx.Sequential(nnx.Linear(16, 32, rngs=nnx.Rngs(0)))))
      in FP8: nothing
      left as it is: layers/0 (Linear without FP8)
    """
    in_fp8, left = [], {}
    for path, module in nnx.iter_modules(model):
        name = "/".join(map(str, path))
        for part, reason in _products_of(module):
            own = f"{name}/{part}" if part else name
            if reason is None:
                in_fp8.append(own)
            else:
                left[own] = reason
    return Listing(tuple(in_fp8), left)


class Product(DotGeneral):
    """The product of MaxText's linear layers: in FP8, or in the dtype of its operands where sizes do not fit."""

    overwrite_with_gradient: bool = True

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        kernel: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        contracted = [kernel.shape[dim] for dim in dimension_numbers[0][1]]
        k = math.prod(contracted)
        if why_not_sizes(k, kernel.size // k) is not None:
            return lax.dot_general(x, kernel, dimension_numbers, precision, preferred_element_type)
        return super().__call__(x, kernel, dimension_numbers, precision, preferred_element_type)


class ExpertEinsum(nn.Module):
    """The einsums of MaxText's experts. Those that are no product of matrices whose sizes fit stay as they are.

    MaxText makes the variables with operands of other sizes than those of the model.
    """

    recipe: Recipe
    dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, subscripts: str, lhs: jax.Array, rhs: jax.Array, **options: PyTree) -> jax.Array:
        state = carried_state(self, self.recipe, rhs)
        lhs, rhs = lhs.astype(self.dtype), rhs.astype(self.dtype)
        if self.is_initializing() or not _fits(subscripts, rhs):
            return jnp.einsum(subscripts, lhs, rhs)
        return einsum_of(self.name or "einsum", subscripts, lhs, rhs, self.recipe, state)


def _fits(subscripts: str, rhs: jax.Array) -> bool:
    """Whether an einsum is one of an input and kernels (experts, in, out) whose sizes fit. MaxText's masks, which send
    tokens to experts and back, have more dims.
    """
    try:
        dims = EinsumDims.parse(subscripts, batched=True)
    except ValueError:
        return False
    if rhs.ndim != 3:
        return False
    sizes = dict(zip(dims.kernel, rhs.shape, strict=True))
    k, columns = (math.prod(sizes[label] for label in labels) for labels in (dims.contracted, dims.columns))
    return why_not_sizes(k, columns) is None


# ---- what is replaced in MaxText -------------------------------------------------------------------------------------


def _install(quantizations: Any, moe: Any, model_creation: Any, accumulation: Any, linears: Any, wrappers: Any) -> None:
    class JaxFp8(quantizations.Fp8Quantization):
        """The `Quantization` of MaxText that hands out our products. Its state is made and read like that of Flax."""

        quantize_dtype = None  # of kernels for TPUs

        def dot_general_cls(self, mesh_axes: tuple[str, ...] = ()) -> Callable[[], Product]:
            del mesh_axes
            return functools.partial(Product, recipe=_IN_USE.recipe)

        def einsum(self, dtype: jax.typing.DTypeLike = jnp.float32) -> ExpertEinsum:
            return ExpertEinsum(_IN_USE.recipe, dtype)

    own_configure, own_create = quantizations.configure_quantization, model_creation.create_model
    own_gate = moe.GateLogit.__init__

    @functools.wraps(own_configure)
    def configure(config: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = config.quantization == STANDS_FOR and not config.use_qwix_quantization
        return JaxFp8() if is_ours else own_configure(config, *args, **kwargs)

    @functools.wraps(own_create)
    def create(*args: Any, **kwargs: Any) -> nnx.Module:
        model = own_create(*args, **kwargs)
        head = getattr(getattr(model, "decoder", None), "logits_dense", None)
        if _IN_USE.head is not None and type(head) is linears.DenseGeneral and not getattr(head, "quant", None):
            _take_head(head, wrappers.ToNNX(Product(_IN_USE.head)))
        found = listing(model)
        if found.in_fp8 and not _IN_USE.was_listed:
            _IN_USE.was_listed = True
            print(f"jax_fp8 in MaxText, {_IN_USE.recipe!r}\n{found}", flush=True)
        return model

    @functools.wraps(own_gate)
    def gate(self: Any, *args: Any, quant: Any = None, **kwargs: Any) -> None:
        own_gate(self, *args, quant=None if isinstance(quant, JaxFp8) else quant, **kwargs)

    quantizations.configure_quantization, model_creation.create_model = configure, create
    moe.GateLogit.__init__ = gate
    accumulation.nnx = _WithCarriedState()


def _take_head(head: Any, product: Any) -> None:
    """Give the head a product, as the constructor of MaxText's layers does, which leaves it without."""
    head._quant_dot_general_name = "Product_0"
    setattr(head, head._quant_dot_general_name, product)
    head(jnp.zeros((1, *head.in_features_shape), head.dtype), _initializing=True)


class _WithCarriedState:
    """`flax.nnx` with a gradient function that also writes new states, the gradients of states, into the model."""

    def __getattr__(self, name: str) -> Any:
        return getattr(nnx, name)

    @staticmethod
    def value_and_grad(loss_fn: Callable, *, argnums: int = 0, has_aux: bool = False) -> Callable:
        carried = variablelib.variable_type_from_name(OVERWRITE_WITH_GRADIENT, allow_register=True)
        by_both = nnx.DiffState(argnums, nnx.Any(nnx.Param, carried))
        differentiate = nnx.value_and_grad(loss_fn, argnums=by_both, has_aux=has_aux)

        @functools.wraps(loss_fn)
        def run(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
            value, grads = differentiate(*args, **kwargs)
            grads, state = nnx.split_state(grads, nnx.Param, ...)
            nnx.update(args[argnums], state)
            return value, grads

        return run


def _products_of(module: nnx.Module) -> Iterator[tuple[str, str | None]]:
    """The products of one module: the name inside of it, and the reason why it is not in FP8, or None."""
    bridged = getattr(module, "quant_dot_general", None)
    if bridged is not None and isinstance(bridged.to_nnx__module, Product):
        layer: Any = module
        yield "", why_not_sizes(*map(math.prod, (layer.in_features_shape, layer.out_features_shape)))
        return
    if type(module).__name__ == "GateLogit":
        yield "", ROUTER
        return
    einsums = getattr(module, "quant_einsums", None)
    if einsums is not None:
        is_sparse = module.config.sparse_matmul  # type: ignore[attr-defined]
        for name, einsum in einsums.items():
            if isinstance(einsum.to_nnx__module, ExpertEinsum) and name.startswith("w"):
                sizes = getattr(module, name).shape[-2:]
                yield name, "a ragged product of sparse_matmul=true" if is_sparse else why_not_sizes(*sizes)
        return
    params = [value for value in vars(module).values() if isinstance(value, nnx.Param)]
    is_norm = "Norm" in type(module).__name__  # whose scales have two dims where layers are stacked
    if not is_norm and any(len(param.shape) > 1 for param in params):
        yield "", f"{type(module).__name__} without FP8"


if __name__ == "__main__":
    try:
        _read(sys.argv[1:])
        imported("maxtext", "maxtext")
    except (ValueError, ImportError) as mistake:  # of the command line; errors of a run keep their traceback
        sys.exit(f"jax_fp8.integrations.maxtext: {mistake}")
    main()
