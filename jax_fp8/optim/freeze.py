"""Frozen params in the optimizer: no moments, no masters, no updates; and in a compiled step no gradients."""

import operator
import re
from collections.abc import Callable

import jax
import optax

from jax_fp8.core.fp8_array import is_fp8
from jax_fp8.core.paths import map_with_names
from jax_fp8.core.types import PyTree
from jax_fp8.optim.parts import update_part
from jax_fp8.optim.updates import InPlace

Rule = str | Callable[[str], bool]


def freeze(
    tx: optax.GradientTransformation, frozen: Rule | None = None, *, trained: Rule | None = None
) -> optax.GradientTransformationExtraArgs:
    """Freeze params: `tx` sees the others alone, and frozen params keep every bit.

    The optimizer stores nothing for frozen params. A compiled step does not compute their gradients, because nothing
    reads them. So `tx` should hold all transforms that read gradients, such as clipping by global norm. To store frozen
    kernels in FP8 as well, use `freeze_kernels`.

    Args:
      tx: an Optax transform, or a chain of some.
      frozen: which params are frozen: a regular expression that is searched in the path of a param, such as
        "layer_0/attention/query/kernel"; or a function of the path.
      trained: which params are trained, in the same form. Pass one of the two.

    Returns:
      An Optax transform.

    Raises:
      ValueError: if not exactly one rule is given, or a rule is neither a regular expression nor a function. `init` and
        `update` raise it where the rule matches no param.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_fp8 as fp8
      >>> tx = fp8.freeze(fp8.fused_adamw(1e-3), trained="lora_")
      >>> params = {"kernel": jnp.ones((4, 4)), "lora_a": jnp.ones((4, 2))}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> bool(jnp.any(updates["kernel"])), bool(jnp.any(updates["lora_a"]))
      (False, True)
    """
    if (frozen is None) == (trained is None):
        raise ValueError(
            f"freeze needs one rule, frozen or trained, got {'both' if frozen is not None else 'none'}; pass "
            'trained="lora_" to train adapters alone'
        )
    rule = frozen if trained is None else trained
    matches = _matcher(rule)

    def is_trained(params: PyTree) -> PyTree:
        """Like the params: whether each is trained. Raise where the rule matches none, as a misspelt one would."""
        paths = map_with_names(lambda names, _: "/".join(map(str, names)), params, is_leaf=is_fp8)
        matched = jax.tree.map(matches, paths)
        if not any(jax.tree.leaves(matched)):
            example = next(iter(jax.tree.leaves(paths)), "none")
            raise ValueError(
                f"a rule of freeze must match at least one param, got {rule!r}, which matches no path such as "
                f"{example!r}; correct it, or leave freeze out"
            )
        return matched if trained is not None else jax.tree.map(operator.not_, matched)

    inner = optax.masked(optax.with_extra_args_support(tx), is_trained)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, in_place: InPlace | None = None, **extra: PyTree
    ) -> tuple[PyTree, PyTree]:
        mask = is_trained(updates if params is None else params)
        return update_part(inner, mask, None, updates, state, params, in_place=in_place, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _matcher(rule: Rule | None) -> Callable[[str], bool]:
    if callable(rule):
        return lambda path: bool(rule(path))
    if isinstance(rule, str):
        try:
            pattern = re.compile(rule)
        except re.error as error:
            raise ValueError(
                f"a rule of freeze must be a regular expression or a function of a path, got {rule!r}: {error}; write "
                'it as for re.search, such as "lora_"'
            ) from None
        return lambda path: pattern.search(path) is not None
    raise ValueError(
        f"a rule of freeze must be a regular expression or a function of a path, got {rule!r}; pass a str such as "
        '"lora_"'
    )
