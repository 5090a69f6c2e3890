"""Gradients of a loss, and what backward passes hand over beside them. One class makes every pass, `GradientTape`."""
