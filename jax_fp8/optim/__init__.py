"""The optimizer: a fused Adam as an Optax transform, its state, and what it hands back."""
