"""Which equations are collectives, by the names of their primitives, and over which axes they go."""

from typing import Any

# Primitive: the function of jax.lax that it is. Those that only cast between varying and invariant send nothing.
COLLECTIVES = {
    "psum": "psum",
    "psum_invariant": "psum",
    "unreduced_psum": "psum",
    "pmax": "pmax",
    "unreduced_pmax": "pmax",
    "pmin": "pmin",
    "unreduced_pmin": "pmin",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "psum_scatter",
    "unreduced_reduce_scatter": "psum_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "ppermute",
    "pbroadcast": "pbroadcast",
}


def axes_of(equation: Any) -> tuple[Any, ...]:
    """The axes of a collective, or of `axis_index`: those of a mesh by name, those of a `jax.vmap` also by number."""
    params = equation.params
    named = params["axes"] if "axes" in params else params["axis_name"]
    return named if isinstance(named, tuple) else (named,)
