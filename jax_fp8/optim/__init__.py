"""The optimizer: a fused Adam as an Optax transform, its state, and the updates that it returns."""
