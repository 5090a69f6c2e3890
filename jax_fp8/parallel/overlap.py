"""Collectives beside compute: what XLA's scheduler is told of a step on a mesh.

By itself it lets one collective run at a time, and begins it only where it sees enough left to hide it under. It takes
the kernels of a custom call to be short, so sums of gradients came last and alone.

    without   ... wgrad │ sum wgrad │ sum wgrad │ sum      each sum beside one product
    with      ... wgrad │ wgrad │ wgrad │ wgrad            a sum begins as soon as its gradient is there,
                         └ sum ┘└ sum ┘└ sum ┘             and is waited for where it is read

They run one after another in the order in which they begin, which is the same on all devices.

The ticks of a pipeline are a loop around a conditional, through which all that is kept goes untouched. XLA sees that
nothing need be copied if it looks at regions of the program, and not at its instructions alone.
"""

OVERLAP_OPTIONS = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4096,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_copy_insertion_use_region_analysis": True,
}
