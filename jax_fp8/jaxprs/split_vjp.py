"""A forward and its backward as two programs, with the residuals between them as arrays, which may stay in memory for
as long as a schedule needs.

    constants, x ─forward→ y, kept            kept: residuals that depend on x, each array once
    constants, kept, dy ─backward→ dx, ...    constants, and residuals that depend only on them, are not kept

`jax.vjp` returns a function that holds the residuals. Here the same function is traced twice. In the second trace the
kept arrays replace the residuals that this trace has computed; the forward of the second trace is then dead code, and
is removed. Refs that the backward writes to are constants of a trace, so each trace has its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from jax_fp8.jaxprs.dead_code import without_dead_code
from jax_fp8.jaxprs.equations import Atom, variables


@dataclass(frozen=True)
class Halves:
    """The two halves of the derivative of a function.

    Args:
      pull_back: `pull_back(constants, x, refs) -> y, pull`, as `jax.vjp` returns them, for a function whose pullback
        has the same structure whenever it is traced.
      make_refs: makes the Refs that the pullback writes to, for a trace in which it does not run.
      constants: shapes.
      x: shapes.
    """

    pull_back: Callable[..., tuple[Any, Callable]]
    make_refs: Callable[[], object]
    constants: object
    x: object

    def forward(self, constants: object, x: object) -> tuple[Any, list[jax.Array]]:
        """y, and the residuals that `pullback` takes as `kept`."""
        program, _, y_structure = self._forward
        results = program(*jax.tree.leaves((constants, x)))
        return y_structure.unflatten(results[: y_structure.num_leaves]), results[y_structure.num_leaves :]

    def pullback(self, constants: object, x: object, kept: list[jax.Array], refs: object) -> Callable:
        """The pullback of the `forward` that returned `kept`; of `x` only the shape matters. This traces the forward
        again, as dead code, which `needed` removes.
        """
        _, pull = self.pull_back(constants, x, refs)
        leaves, structure = jax.tree.flatten(pull)
        numbers = self._forward[1]
        return structure.unflatten(
            [leaf if number is None else kept[number] for leaf, number in zip(leaves, numbers, strict=True)]
        )

    @cached_property
    def _forward(self) -> tuple[Callable, list[int | None], Any]:
        """The program; for each leaf of the pullback its number among the kept arrays, or None; the structure of y."""
        is_ref: list[bool] = []

        def run(constants: object, x: object) -> tuple[Any, list[jax.Array]]:
            y, pull = self.pull_back(constants, x, self.make_refs())
            leaves = jax.tree.leaves(pull)
            is_ref[:] = [isinstance(leaf, jax.Ref) for leaf in leaves]
            return y, [leaf for leaf in leaves if not isinstance(leaf, jax.Ref)]

        closed, (y, _) = jax.make_jaxpr(run, return_shape=True)(self.constants, self.x)
        jaxpr, y_structure = closed.jaxpr, jax.tree.structure(y)
        inputs = len(jax.tree.leaves(self.x))
        depends_on_x = _dependents(jaxpr, jaxpr.invars[len(jaxpr.invars) - inputs :])
        residuals = iter(jaxpr.outvars[y_structure.num_leaves :])
        kept: dict[Var, int] = {}
        numbers: list[int | None] = []
        for leaf_is_ref in is_ref:
            var = None if leaf_is_ref else next(residuals)
            if var is None or isinstance(var, Literal) or var not in depends_on_x:
                numbers.append(None)
            else:
                numbers.append(kept.setdefault(var, len(kept)))
        outvars = [*jaxpr.outvars[: y_structure.num_leaves], *kept]
        return _as_function(closed, outvars), numbers, y_structure


def needed(function: Callable, *shapes: object) -> Callable:
    """The same function, traced now for arguments of these shapes, without dead code."""
    closed, results = jax.make_jaxpr(function, return_shape=True)(*shapes)
    program, structure = _as_function(closed, closed.jaxpr.outvars), jax.tree.structure(results)
    return lambda *args: structure.unflatten(program(*jax.tree.leaves(args)))


def _as_function(closed: ClosedJaxpr, outvars: list[Atom]) -> Callable[..., list[jax.Array]]:
    """A traced program with only these results, as a function of leaves that returns a list."""
    return jax.jit(jaxpr_as_fun(without_dead_code(closed, outvars)))


def _dependents(jaxpr: Jaxpr, sources: list[Var]) -> set[Var]:
    """These variables, and all that depend on them."""
    dependents = set(sources)
    for equation in jaxpr.eqns:
        if not dependents.isdisjoint(variables(equation.invars)):
            dependents.update(equation.outvars)
    return dependents
