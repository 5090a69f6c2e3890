"""Tunix: its trainers with the scales of delayed scaling, and its models with every linear layer in FP8.

    fp8_nnx.convert(model, recipe)  →  in_fp8(PeftTrainer)(model, optimizer, config).train(...)

A recipe without state, such as `CurrentScaling`, needs `convert` alone. This module imports nothing of Tunix.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_fp8.core.types import PyTree
from jax_fp8.nnx.gradients import value_and_grad
from jax_fp8.nnx.gradients import warm_start as warm_start_of
from jax_fp8.nnx.state import finish_step, gemms_of, state_of, write

Trainer = TypeVar("Trainer", bound=type)
BASE = "PeftTrainer"  # of Tunix; its other trainers derive from it
STEP = "_train_step"


def in_fp8(trainer: Trainer) -> Trainer:
    """A trainer of Tunix whose steps record the amaxes of all passes, and compute the scales of the next step.

    It trains the params that Tunix's own trains: adapters alone, if the model has any. With gradient accumulation, the
    scales are those of a whole optimizer step.

    Args:
      trainer: `tunix.PeftTrainer`, or a class that derives from it and has no train step of its own.

    Returns:
      A class derived from it, with the same arguments and methods.

    Raises:
      ValueError: if it is no such class.

    Example:
      >>> from jax_fp8.integrations.tunix import in_fp8
      >>> class PeftTrainer:
      ...     "Stands for that of Tunix."
      ...     def _train_step(self, model, optimizer, inputs): ...
      >>> in_fp8(PeftTrainer).__name__
      'Fp8PeftTrainer'
    """
    bases = [cls for cls in getattr(trainer, "__mro__", ()) if cls.__name__ == BASE]
    if not isinstance(trainer, type) or not bases or not hasattr(bases[0], STEP):
        raise ValueError(f"in_fp8 needs a trainer class of Tunix, which derives from {BASE}, got {trainer!r}; pass one")
    if getattr(trainer, STEP) is not getattr(bases[0], STEP):
        raise ValueError(
            f"in_fp8 needs the train step of {BASE}, got {trainer.__name__}, which has its own; use a recipe without "
            "state, such as CurrentScaling, with which every step is right"
        )
    return type(f"Fp8{trainer.__name__}", (_Fp8Step, trainer), {})  # type: ignore[return-value]


def warm_start(trainer: Any, inputs: Any) -> None:
    """Give the model of a trainer scales for its first step.

    They come from a pass in which each tensor is scaled by its own amax. Without it, the first step scales inputs and
    output gradients by 1.

    Args:
      trainer: of Tunix.
      inputs: a batch, as the trainer's `train` takes them.

    Example:
      >>> from types import SimpleNamespace
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import jax_fp8.nnx
      >>> from jax_fp8.integrations.tunix import warm_start
      >>> def loss_fn(model, x):
      ...     return jnp.mean(model(x).astype(jnp.float32))
      >>> trainer = SimpleNamespace(  # stands for that of Tunix
      ...     model=jax_fp8.nnx.Linear(16, 32, rngs=nnx.Rngs(0)),
      ...     loss_fn=loss_fn, gen_model_input_fn=lambda x: {"x": x}, _has_aux=False, _lora_enabled=False,
      ... )
      >>> warm_start(trainer, jnp.full((16, 16), 896.0))
      >>> trainer.model.fp8.scale[0].item()
      2.0
    """
    first_scales = warm_start_of(trainer.loss_fn, argnums=_trained(trainer), has_aux=trainer._has_aux)
    run = nnx.jit(lambda model, inputs: first_scales(model, **trainer.gen_model_input_fn(inputs)))
    run(trainer.model, inputs)


class _Fp8Step:
    """The train step of `PeftTrainer`, with gradients that record amaxes."""

    loss_fn: Any
    gen_model_input_fn: Any
    _has_aux: bool

    def _train_step(
        self, model: nnx.Module, optimizer: nnx.Optimizer, inputs: Mapping[str, Any]
    ) -> tuple[jax.Array, PyTree, jax.Array]:
        """Returns the loss, what the loss returns beside it or None, and the norm of the gradients."""
        differentiate = value_and_grad(self.loss_fn, argnums=_trained(self), has_aux=self._has_aux)
        out, grads = differentiate(model, **self.gen_model_input_fn(inputs))
        optimizer.update(model, grads)
        gemms = gemms_of(model)
        staged = state_of(gemms)
        finish_step(gemms)
        is_whole = _is_whole_step(optimizer)
        write(gemms, jax.tree.map(lambda new, old: jnp.where(is_whole, new, old), state_of(gemms), staged))
        loss, aux = out if self._has_aux else (out, None)
        return loss, aux, optax.tree.norm(grads)


def _trained(trainer: Any) -> int | nnx.DiffState:
    """The params that Tunix trains, as an argument of `value_and_grad`."""
    return nnx.DiffState(0, nnx.LoRAParam) if trainer._lora_enabled else 0


def _is_whole_step(optimizer: nnx.Optimizer) -> bool | jax.Array:
    """Whether the update before this call changed the params: with `optax.MultiSteps`, that of the last microbatch."""
    mini_step = getattr(optimizer.opt_state, "mini_step", None)
    return True if mini_step is None else mini_step[...] == 0
