"""A run of a person: data, tokens, the loop, checkpoints, logs, progress, and the folder that it leaves.

`python -m jax_fp8 train` starts it. It needs the packages of the extra `train`: `import jax_fp8` does not import it.
"""
