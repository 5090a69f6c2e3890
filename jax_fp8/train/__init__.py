"""Training: the optimizer, the state, the step, and what explains them. Takes functions; knows neither modules nor models."""
