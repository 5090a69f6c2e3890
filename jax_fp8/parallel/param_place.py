"""Where one param lies on a mesh: which of its dims the axes split."""

from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from jax_fp8.parallel.mesh import EXPERT, FSDP, TENSOR, Parallelism


@jax.tree_util.register_static
@dataclass(frozen=True)
class ParamPlace:
    """Where a param lies.

    Args:
      shape: of the whole param.
      tensor_dim, fsdp_dim: the dims, counted from the end, that these axes split; None where they split none. All axes
        of `storage` split `fsdp_dim`.
      is_partial: every device of `tensor` has the whole param and uses a part of it: the gradient is a sum over them.
      dtype: the dtype in which layers read it; None if they read it in several, or in its own.
      storage: the axes `fsdp` and `pipe`, as far as the mesh has them.
      expert_dim: the dim that `expert` splits, likewise.
    """

    shape: tuple[int, ...]
    tensor_dim: int | None = None
    fsdp_dim: int | None = None
    is_partial: bool = False
    dtype: jax.typing.DTypeLike | None = None
    storage: tuple[str, ...] = (FSDP,)
    expert_dim: int | None = None

    @property
    def spec(self) -> PartitionSpec:
        """Where several axes split one dim, `fsdp` splits the parts of `tensor`, and `pipe` those of `fsdp`."""
        of_dims: list[tuple[str, ...]] = [()] * len(self.shape)
        dims = (self.tensor_dim, (TENSOR,)), (self.fsdp_dim, self.storage), (self.expert_dim, (EXPERT,))
        for dim, axes in dims:
            if dim is not None:
                of_dims[dim] += axes
        while of_dims and not of_dims[-1]:
            of_dims.pop()
        return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in of_dims))

    def shape_in_layer(self, parallel: Parallelism) -> tuple[int, ...]:
        """The shape of a device's part of the param, as its layer takes it: gathered over `storage`."""
        shape = list(self.shape)
        for dim, axis in ((self.tensor_dim, TENSOR), (self.expert_dim, EXPERT)):
            if dim is not None:
                shape[dim] //= parallel.size(axis)
        return tuple(shape)
