"""Gradients of a loss, and the amaxes and measurements of its backward. Every pass is made by a `GradientTape`."""
