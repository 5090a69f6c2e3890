"""Whether the kernels of FP8 layers are params as they are, or what the loss has made of them.

Weights that are cast once for several microbatches, or carried by the state, are those of the params; and the GEMMs of
several microbatches add up gradients of kernels as if they were those of params. A loss that scales, masks or freezes a
kernel before its layer reads it would be ignored in both. So it is refused there.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_fp8.core.deferral import Notes, kernel_mark
from jax_fp8.core.paths import kernel_paths
from jax_fp8.jaxprs.named_values import UNCHANGED, Origin, origins
from jax_fp8.train.delayed import TracedPass

# A gradient passes a cast, and another shape of the same elements, as it is.
AS_IT_IS = (*UNCHANGED, "convert_element_type", "reshape", "squeeze", "expand_dims", "broadcast_in_dim")


def check_kernels_are_params(loss_fn: Callable, variables: Mapping, *args: Any, has_aux: bool = False) -> None:
    """Raise if the loss changes a kernel before an FP8 layer reads it; the loss is traced, as on one device."""
    known = {name: tree for name, tree in variables.items() if name != "fp8_cache"}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), (known, args))
    jax.eval_shape(lambda variables, args: _check_traced(loss_fn, has_aux, variables, args), *shapes)


def _check_traced(loss_fn, has_aux, variables, args):
    a_pass, loss = TracedPass.of(loss_fn, has_aux, variables, args, {}).trace_loss(Notes())
    params = [Origin(number) for number in range(len(jax.tree.leaves(variables["params"])))]
    found = origins(loss, params, AS_IT_IS)
    for number, gemm in enumerate(a_pass.gemms):
        for position, kernel in enumerate(kernel_paths(gemm)):
            if None in found.get(kernel_mark(number, position), ()):
                raise ValueError(
                    "with several microbatches or a weight cache, FP8 layers must get their kernels as they are in the "
                    f"params, got {'/'.join(kernel)} changed by the loss; freeze params in the optimizer, or take one "
                    "microbatch and no cache"
                )
