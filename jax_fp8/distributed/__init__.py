"""One pass over a batch: on one device, on the devices of a mesh, or through the stages of a pipeline."""
