"""Trainers of other libraries, with FP8: one module each. None of them is imported by `import jax_fp8`."""
