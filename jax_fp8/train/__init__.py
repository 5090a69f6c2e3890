"""Training: gradients with their amaxes, microbatches, the weight cache, the state, and the step.

Takes functions; knows neither modules nor models.
"""
