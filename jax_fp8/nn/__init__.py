"""Flax Linen modules: parameters, FP8 state and wiring. The numerics are in `ops`."""
