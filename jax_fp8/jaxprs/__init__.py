"""What is read from traced programs. This is the only room that knows how jax writes a jaxpr down; it knows nothing of
FP8.
"""
