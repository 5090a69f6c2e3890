"""A forward and its backward as two programs, with the residuals between them as arrays that can be stored.

    constants, x ─forward→ y, kept            kept: the residuals that depend on x, each array once
    constants, kept, dy ─backward→ dx, ...    constants, and values of constants alone, are not kept

The function that `jax.vjp` returns holds its residuals. Here the function is traced twice. In the second trace the kept
arrays replace the residuals that the trace has computed; its forward is then dead code, and removed. A Ref that the
backward writes to is a constant too, so each trace has its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from jax_fp8.jaxprs.dead_code import without_dead_code
from jax_fp8.jaxprs.equations import variables
from jax_fp8.jaxprs.scopes import with_scope


@dataclass(frozen=True)
class Program:
    """A traced function. A call repeats its equations in the trace around it, which takes a tenth of tracing it anew.

    Args:
      traced: the jaxpr, of leaves.
      unflatten: makes what the function returns from its leaves.
    """

    traced: ClosedJaxpr
    unflatten: Callable

    def __call__(self, *args: object) -> Any:
        return self.unflatten(jaxpr_as_fun(self.traced)(*jax.tree.leaves(args)))

    def in_scope(self, old: str, new: str) -> "Program":
        """The same, with the name `new` where equations have the named scope `old`."""
        return replace(self, traced=with_scope(self.traced, old, new))


@dataclass(frozen=True)
class Halves:
    """The two halves of the derivative of a function.

    Args:
      pull_back: `pull_back(constants, x, refs) -> y, pull`, as `jax.vjp` returns them, for a function whose pullback
        has the same structure whenever it is traced.
      make_refs: makes what the pullback writes to, for a trace in which it does not run.
      constants, x: shapes.
    """

    pull_back: Callable[..., tuple]
    make_refs: Callable[[], object]
    constants: object
    x: object

    @property
    def forward(self) -> Program:
        """`forward(constants, x) -> y, kept`, where `kept` is a list."""
        return self._forward[0]

    def pullback(self, constants: object, x: object, kept: list[jax.Array], refs: object) -> Callable:
        """That of a `forward` which kept this; of `x` only the shape counts. The trace has the forward again, which is
        dead: see `needed`.
        """
        _, pull = self.pull_back(constants, x, refs)
        leaves, tree = jax.tree.flatten(pull)
        return tree.unflatten(
            [leaf if number is None else kept[number] for leaf, number in zip(leaves, self._forward[1], strict=True)]
        )

    @cached_property
    def _forward(self) -> tuple[Program, list[int | None]]:
        """The program; and for each leaf of the pullback its number among what is kept, or None."""
        found: dict[str, Any] = {}

        def run(constants: object, x: object) -> tuple[list, list]:
            y, pull = self.pull_back(constants, x, self.make_refs())
            leaves = jax.tree.leaves(pull)
            found["is_ref"] = [isinstance(leaf, jax.Ref) for leaf in leaves]
            found["y"] = jax.tree.structure(y)
            return jax.tree.leaves(y), [leaf for leaf in leaves if not isinstance(leaf, jax.Ref)]

        closed = jax.make_jaxpr(run)(self.constants, self.x)
        jaxpr, tree = closed.jaxpr, found["y"]
        inputs = len(jax.tree.leaves(self.x))
        of_x = _reached(jaxpr, jaxpr.invars[len(jaxpr.invars) - inputs :])
        outputs = iter(jaxpr.outvars[tree.num_leaves :])
        kept: dict[object, int] = {}
        numbers: list[int | None] = []
        for is_ref in found["is_ref"]:
            var = None if is_ref else next(outputs)
            is_kept = var is not None and not isinstance(var, Literal) and var in of_x
            numbers.append(kept.setdefault(var, len(kept)) if is_kept else None)
        outvars = [*jaxpr.outvars[: tree.num_leaves], *kept]
        results = jax.tree.structure((tree.unflatten([0] * tree.num_leaves), [0] * len(kept)))
        return Program(without_dead_code(closed, outvars), results.unflatten), numbers


def needed(function: Callable, *shapes: object) -> Program:
    """The same function of such arguments, traced now, without what its results do not need."""
    closed, results = jax.make_jaxpr(function, return_shape=True)(*shapes)
    return Program(without_dead_code(closed), jax.tree.structure(results).unflatten)


def _reached(jaxpr: Jaxpr, given: list[Var]) -> set[Var]:
    """What depends on these variables."""
    reached = set(given)
    for equation in jaxpr.eqns:
        if not reached.isdisjoint(variables(equation.invars)):
            reached.update(equation.outvars)
    return reached
