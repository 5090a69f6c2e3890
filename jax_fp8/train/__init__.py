"""Training: the step with its warm pass and its CUDA graph, and the parts of a loop that a user writes.

Takes functions; knows neither modules nor models.
"""
