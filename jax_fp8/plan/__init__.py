"""What a training step would need on GPUs that are not here: memory, traffic, time."""
