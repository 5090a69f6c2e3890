"""qwix: linear products of a Flax model that nobody changed, of Linen or NNX, in FP8, by rules on module paths.

    qwix.quantize_model(model, Fp8Provider({".*lm_head": None, ".*": fp8.DelayedScaling()}), *inputs)

While the model is called, qwix hands `lax.dot_general`, `jnp.einsum`, `jnp.dot` and `jnp.matmul` to a provider. A
product is one by a kernel where an operand has the shape of a param of the module that multiplies. Shapes are the same
eagerly, in a trace and under a gradient, so a product is taken in each of them or in none. Its state lies beside this
param in "_overwrite_with_gradient" (ops/carried_state.py). `quantize_model` makes it in NNX, and `init` in Linen.

What is known here of qwix: what `quantize_model` calls of a provider, `get_current_module`, `aux_data`, which qwix
clears before each call, the attributes `qwix_path` and `disable_quant_stats_update` of NNX modules (true in the call
that makes variables), `_unquantized_type` of classes, and the names of adapters.
"""

import dataclasses
import functools
import inspect
import math
import re
import string
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import tracers
from flax.errors import TraceContextError
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.nnx import variablelib
from flax.traverse_util import flatten_dict
from jax import lax

from jax_fp8.core.checks import describe
from jax_fp8.core.recipe import Recipe, check_recipe
from jax_fp8.core.types import PyTree
from jax_fp8.integrations.listing import Listing, why_not_sizes
from jax_fp8.integrations.modules import imported
from jax_fp8.ops.dot_general import DTYPES, check_precision, einsum_of, init_state
from jax_fp8.ops.einsum_dims import EinsumDims

Rules = Mapping[str, Recipe | None] | Sequence[tuple[str, Recipe | None]]
ADAPTERS, OPERANDS = ("_lora_a", "_lora_b"), ("lhs", "rhs", "a", "b")  # names in qwix and in jax
ONE_CALL = (
    "a second call of quantize_model or apply_lora_to_model would take the first provider out of this model; begin "
    "with one that has none, and call one of them once, with Fp8Provider(rules, adapters=qwix.LoraProvider(...))"
)
FOREIGN = "inside of a transformation that Flax does not see, such as that of jax.jit"
FUNCTIONS = {"jax.lax.dot_general": lax.dot_general, "jax.numpy.einsum": jnp.einsum}
FUNCTIONS |= {"jax.numpy.dot": jnp.dot, "jax.numpy.matmul": jnp.matmul}
SIGNATURES = {name: inspect.signature(function) for name, function in FUNCTIONS.items()}


class Fp8Provider:
    """A provider for `qwix.quantize_model` that computes linear products in FP8.

    A product is in FP8 if a rule gives its module a recipe. It is left if both operands are activations, if sizes are
    no multiples of 16, and if it is no product of matrices. The first call of the model prints what is in FP8, and what
    is left and why. Later, an input whose rows are no multiple of 16 is multiplied in its own dtype, with a warning.

    Args:
      rules: regular expressions for whole paths of modules, such as "layers/0/mlp/up", each with a recipe, or with None
        to leave these modules as they are. The first that matches holds, as with qwix's own rules.
      adapters: a `qwix.LoraProvider`, for adapters beside kernels in FP8.

    Raises:
      ValueError: if `rules` are no rules.
      ImportError: if qwix is not installed.

    Example:
      >>> import jax_fp8 as fp8
      >>> from jax_fp8.integrations.qwix import Fp8Provider
      >>> def in_fp8(model, *inputs):
      ...     import qwix
      ...     rules = {".*lm_head": None, ".*mlp.*": fp8.CurrentScaling(), ".*": fp8.DelayedScaling()}
      ...     return qwix.quantize_model(model, Fp8Provider(rules), *inputs)  # inputs for NNX models alone
      >>> in_fp8.__name__
      'in_fp8'
    """

    disable_jit = False  # qwix asks for it

    def __init__(self, rules: Rules, *, adapters: PyTree = None):
        self._rules = _checked(rules)
        self._adapters = adapters
        self._host = imported("qwix", "qwix").QuantizationProvider([])  # for what all providers of qwix do
        self._current_module = imported("qwix._src.utils.flax_util", "qwix").get_current_module
        self._aux_data = imported("qwix._src.aux_data", "qwix")
        self._run = threading.local()  # the model that this thread calls, and the trace in which it does
        self._found: dict[tuple[str, str], str | None] = {}  # path and product: the reason why it is left, or None
        self._seen: set[tuple[str, str]] = set()  # params with a product, by paths and names
        self._others: dict[str, str] = {}  # params without one
        self._was_called = False

    def listing(self) -> Listing:
        """Which products of the model are in FP8, and which are left, and why.

        Returns:
          Products by the paths of their modules; where a module has several, each path ends with the product.

        Raises:
          ValueError: if the model was not called yet.

        Example:
          >>> def names(provider):
          ...     return provider.listing().in_fp8
        """
        if not self._was_called:
            raise ValueError("listing needs a call of the model, got none; call quantize_model, and init in Linen")
        paths = [path for path, _ in self._found]
        named = {
            path if path and paths.count(path) == 1 else f"{path}/{op}".lstrip("/"): reason
            for (path, op), reason in self._found.items()
        }
        left = {name: reason for name, reason in named.items() if reason is not None}
        return Listing(tuple(name for name in named if name not in left), left | self._others)

    def get_interceptors(self) -> list[Callable[[], PyTree]]:
        """For qwix: makers of interceptors, of which the last is asked first."""
        return [self._interceptor, *(self._adapters.get_interceptors() if self._adapters else ())]

    def process_model_inputs(self, model: PyTree, args: PyTree, kwargs: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        """For qwix, before a call of the model."""
        for provider in filter(None, (self._host, self._adapters)):
            model, args, kwargs = provider.process_model_inputs(model, args, kwargs)
        if self._adapters is None and any(name.endswith(ADAPTERS) for _, name in _params(model)):
            raise ValueError(ONE_CALL)
        if "_unquantized_type" in vars(type(model)):
            type(model)._unquantized_type = _Refusal()  # qwix reads it before it puts in another provider
        self._run.model, self._run.trace = model, tracers.current_trace()
        return model, args, kwargs

    def process_model_output(self, method_name: str, model_output: PyTree) -> PyTree:
        """For qwix, after a call of the model."""
        for provider in filter(None, (self._adapters, self._host)):
            model_output = provider.process_model_output(method_name, model_output)
        if not self._was_called:
            self._was_called = True
            params = [key for key in _params(self._run.model) if not (key in self._seen or key[1].endswith(ADAPTERS))]
            self._others = {f"{path}/{name}".lstrip("/"): "no product by this param was seen" for path, name in params}
            print(f"jax_fp8 in qwix\n{self.listing()}", flush=True)
        self._run.model = None
        return model_output

    def _interceptor(self) -> PyTree:
        of_host = self._host.get_interceptors()[0]()
        own = {name: functools.partial(self._multiply, name) for name in FUNCTIONS}
        return dataclasses.replace(of_host, mapping={**of_host.mapping, **own}, id=id(self))

    def _multiply(self, function: str, *args: PyTree, **settings: PyTree) -> jax.Array:
        as_it_is = functools.partial(FUNCTIONS[function], *args, **settings)
        try:
            layer = _Layer(self._current_module())
        except ValueError:  # outside of all modules, or in one that is not for qwix
            return as_it_is()
        op = function.rsplit(".", 1)[1]
        text, operands, settings = _read(function, args, settings)
        by = [layer.params_of(operand) for operand in operands]
        self._seen.update((layer.path, name) for names in by for name in names)
        if not layer.is_in_trace(self._run.trace):
            if any(by):  # jax keeps the trace of a jit, for other layers and for models without this provider
                self._found[layer.path, op] = FOREIGN
            return as_it_is()
        if any(by) and all(name.endswith(ADAPTERS) for names in by for name in names):
            return as_it_is()
        if len(by) == 2 and by[0] and not by[1]:
            text, operands = re.sub("(.*),(.*)->", r"\2,\1->", text), operands[::-1]
        counted = layer.module.scope if layer.is_linen else layer.module  # new in each call, or cleared by qwix
        count = self._aux_data.get(counted, f"fp8_{op}", 0)
        self._aux_data.set(counted, f"fp8_{op}", count + 1)
        op = f"{op}{count}"
        recipe, reason = self._recipe_of(layer.path, [name for names in by for name in names])
        rows, reason = (1, reason) if reason else _rows_or_reason(text, operands, settings)
        if rows % 16 and not reason and not layer.is_first_call:
            reason = f"{rows} rows of its input are no multiple of 16"
            warnings.warn(f"{layer.path or op} is not in FP8: {reason}; pad the input", stacklevel=2)
        self._found[layer.path, op] = reason
        if reason or recipe is None:
            return as_it_is()
        state = layer.state(op, recipe, operands[1]) if recipe.has_state else None
        dtype, (lhs, rhs) = settings.get("preferred_element_type"), operands
        return einsum_of(layer.path or op, text, lhs, rhs, recipe, state, None, dtype)

    def _recipe_of(self, path: str, params: Sequence[str]) -> tuple[Recipe | None, str | None]:
        if not params:
            return None, "a product of activations"
        for pattern, recipe in self._rules:
            if re.fullmatch(pattern, path):
                return recipe, f"by the rule {pattern!r}" if recipe is None else None
        return None, "no rule matches"


class _Refusal:
    def __get__(self, *_: PyTree) -> PyTree:
        raise ValueError(ONE_CALL)


def _read(function: str, args: PyTree, kwargs: PyTree) -> tuple[str, tuple[PyTree, ...], dict[str, PyTree]]:
    """A call as an einsum, or "" for one that is none, with the operands, and the settings that are not the default."""
    signature = SIGNATURES[function]
    found = signature.bind(*args, **kwargs).arguments
    settings = {name: value for name, value in found.items() if value is not signature.parameters[name].default}
    text = settings.pop("subscripts", "")
    operands = settings.pop("operands", ()) or tuple(settings.pop(key) for key in [*settings] if key in OPERANDS)
    if function == "jax.lax.dot_general":
        pairs, batch = (list(zip(*dims, strict=True)) for dims in settings.pop("dimension_numbers"))
        lhs, rhs = list(string.ascii_lowercase[: operands[0].ndim]), list(string.ascii_uppercase[: operands[1].ndim])
        for left, right in (*batch, *pairs):
            rhs[right] = lhs[left]
        result = [lhs[left] for left, _ in batch] + [x for x in lhs if x not in rhs] + [x for x in rhs if x not in lhs]
        text = f"{''.join(lhs)},{''.join(rhs)}->{''.join(result)}"
    elif function != "jax.numpy.einsum" and jnp.ndim(operands[1]) == 2:
        text = "...k,kn->...n"
    return (text if isinstance(text, str) else ""), operands, settings


def _rows_or_reason(text: str, operands: Sequence[PyTree], settings: Mapping[str, PyTree]) -> tuple[int, str | None]:
    """The rows of the input, 0 where they may be of any number; and the reason why this cannot be in FP8, or None."""
    try:
        dims = EinsumDims.parse(text, batched=True)
        check_precision("its product", settings.get("precision"))
        lhs, rhs = operands
        sizes = dict(zip(dims.kernel, rhs.shape, strict=True))
    except ValueError as error:
        return 1, str(error).partition(";")[0]
    k, columns = (math.prod(sizes[label] for label in labels) for labels in (dims.contracted, dims.columns))
    dtypes = [jnp.result_type(x) for x in (lhs, rhs, settings.get("preferred_element_type", lhs))]
    reasons = [f"of dtype {dtype}" for dtype in dtypes if dtype not in DTYPES]
    reasons += [
        f"it has {name}" for name in settings if name not in ("precision", "preferred_element_type", "optimize")
    ]
    return 0 if dims.batch else lhs.size // k, next(iter(reasons), None) or why_not_sizes(k, columns)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A module that multiplies, of Linen or NNX."""

    module: PyTree

    def __post_init__(self):
        has_path = self.is_linen or hasattr(self.module, "qwix_path")
        if not has_path or type(self.module).__module__.startswith("jax_fp8."):
            raise ValueError("the module has no path, or is a layer of this library, which is in FP8 by itself")

    @property
    def is_linen(self) -> bool:
        return isinstance(self.module, nn.Module)

    @property
    def path(self) -> str:
        return "/".join(map(str, self.module.path if self.is_linen else self.module.qwix_path))

    @property
    def is_first_call(self) -> bool:
        """Whether this call makes the variables."""
        return self.module.is_initializing() if self.is_linen else self.module.disable_quant_stats_update

    def is_in_trace(self, of_model: PyTree) -> bool:
        """Whether this is the trace of the model's call, or of one of Flax's own transformations."""
        if self.is_linen:
            return self.module.scope.trace_level == tracers.current_trace()
        try:
            self.module.qwix_path = self.module.qwix_path  # NNX lets a module be changed in its own trace alone
        except TraceContextError:
            return tracers.current_trace() == of_model
        return True

    def params_of(self, operand: PyTree) -> list[str]:
        """The params of this module that an operand may be; a matrix may be the transpose of one."""
        shape = getattr(operand, "shape", ())
        shapes = {shape, shape[::-1]} if len(shape) == 2 else {shape}
        return [name for (path, name), own in _params(self.module).items() if path == self.path and own in shapes]

    def state(self, op: str, recipe: Recipe, kernel: jax.Array) -> dict[str, jax.Array]:
        """The state of a product, made in the first call; without one, each tensor is scaled by its own amax."""
        first = init_state(recipe, kernel if self.is_first_call else None)  # not differentiated in later calls
        return {leaf: self._variable(f"{op}_{leaf}", value) for leaf, value in first.items()}

    def _variable(self, name: str, first: jax.Array) -> jax.Array:
        """A variable, made in the first call."""
        if not self.is_linen:
            kind = variablelib.variable_type_from_name(OVERWRITE_WITH_GRADIENT, allow_register=True)
            if self.is_first_call and not hasattr(self.module, name):
                setattr(self.module, name, kind(first))
            return getattr(self.module, name).get_value() if hasattr(self.module, name) else first
        if self.is_first_call and not self.module.is_mutable_collection(OVERWRITE_WITH_GRADIENT):
            raise ValueError(
                f'{self.path}: delayed scaling needs the collection "{OVERWRITE_WITH_GRADIENT}" here; give nn.scan or '
                f'nn.vmap variable_axes={{"{OVERWRITE_WITH_GRADIENT}": 0}}, or use a recipe without state'
            )
        if self.is_first_call and not self.module.has_variable(OVERWRITE_WITH_GRADIENT, name):
            self.module.put_variable(OVERWRITE_WITH_GRADIENT, name, first)
        return self.module.get_variable(OVERWRITE_WITH_GRADIENT, name, first)


def _params(module: PyTree) -> dict[tuple[str, str], tuple[int, ...]]:
    """Shapes of params that may be kernels, by paths and names. Biases and scales of stacked layers have two dims."""
    if isinstance(module, nn.Module):
        flat = flatten_dict(module.variables.get("params", {}))
        found = {(*module.path, *keys): value for keys, value in flat.items()}
    else:
        items = ((path, *item) for path, each in nnx.iter_modules(module) for item in vars(each).items())
        found = {(*module.qwix_path, *path, name): value for path, name, value in items if isinstance(value, nnx.Param)}
    shapes: PyTree = {keys: jax.tree.leaves(value)[0].shape for keys, value in found.items()}  # a box has one leaf
    named = {("/".join(map(str, path)), name): shape for (*path, name), shape in shapes.items()}
    return {key: shape for key, shape in named.items() if key[1] not in ("bias", "scale") and len(shape) > 1}


def _checked(rules: PyTree) -> list[tuple[str, Recipe | None]]:
    """Patterns with recipes, in the order in which they hold."""
    try:
        pairs = [(re.compile(key).pattern, value) for key, value in getattr(rules, "items", lambda: rules)()]
    except (TypeError, ValueError, re.error) as error:
        raise ValueError(
            f"rules must be regular expressions with a recipe or None each, got {describe(rules)}, and {error}; pass "
            '{".*": recipe} for all modules'
        ) from None
    for _, recipe in pairs:
        check_recipe(recipe)
    return pairs
