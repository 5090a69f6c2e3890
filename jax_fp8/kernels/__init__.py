"""One file for each target of csrc: the `jnp` reference, the custom call, its shapes and how it follows shards.

No gradient, no recipe.
"""
