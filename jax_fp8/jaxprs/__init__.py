"""Reading traced programs. Only this room knows how jax represents a jaxpr; it knows nothing of FP8."""
