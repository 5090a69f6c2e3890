"""Training: the step with its warm pass and its CUDA graph, and functions for a training loop of one's own.

This room takes losses and optimizers as functions; it knows neither modules nor models.
"""
