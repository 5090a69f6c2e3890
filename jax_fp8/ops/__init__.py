"""One operation per file: the plain `jnp` reference, the custom call, the sharding rule.

Composite files own the gradient.
"""
