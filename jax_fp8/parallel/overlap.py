"""Options of XLA's compiler for a step on a mesh, with which collectives overlap with compute.

By default XLA's scheduler lets one collective run at a time, and begins it only where it expects enough compute to hide
it. It takes custom calls to be short, so it put the sums of gradients last, where nothing hides them.

    without   ... wgrad │ sum wgrad │ sum wgrad │ sum      each sum beside one product
    with      ... wgrad │ wgrad │ wgrad │ wgrad            a sum begins as soon as its gradient is computed,
                         └ sum ┘└ sum ┘└ sum ┘             and ends before it is read

Sums run one after another in the order in which they begin, which is the same on all devices.

The ticks of a pipeline are a loop around a conditional. Most slots pass through it unchanged. XLA's copy insertion
finds that it need not copy them only when it analyses regions of the program instead of single instructions.
"""

OVERLAP_OPTIONS = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4096,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_copy_insertion_use_region_analysis": True,
}
