"""Models made of the layers in `nn`."""
