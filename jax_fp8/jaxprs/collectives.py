"""Which equations are collectives, by the names of their primitives, and over which axes they communicate."""

from typing import Any

from jax.extend.core import JaxprEqn

# The name of a primitive, and the function of jax.lax that makes it. Primitives that only cast between varying and
# invariant send nothing, and are not listed.
COLLECTIVES = {
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum"), "psum"),
    **dict.fromkeys(("pmax", "unreduced_pmax"), "pmax"),
    **dict.fromkeys(("pmin", "unreduced_pmin"), "pmin"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all_gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "psum_scatter"),
    **{name: name for name in ("all_to_all", "ragged_all_to_all", "ppermute", "pbroadcast")},
}


def axes_of(equation: JaxprEqn) -> tuple[Any, ...]:
    """The axes of a collective, or of `axis_index`: mesh axes by name, axes of a `jax.vmap` by name or number."""
    params = equation.params
    named = params["axes"] if "axes" in params else params["axis_name"]
    return named if isinstance(named, tuple) else (named,)
