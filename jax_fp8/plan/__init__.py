"""Plans: memory, collectives and time of a training step on GPUs that this machine does not have."""
