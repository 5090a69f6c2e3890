"""The state that a training step reads and writes: `TrainState`, the weight cache in it, and how both are saved."""
