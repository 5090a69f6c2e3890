"""What a step is made of beside model and data: the optimizer, and options for the compiler."""

import jax
import optax
from settings import Settings

import jax_fp8 as fp8


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    peak, warmup = settings.learning_rate, max(1, min(settings.steps // 10, 200))
    up = optax.linear_schedule(peak / warmup, peak, warmup)
    down = optax.linear_schedule(peak, 0.0, settings.steps + 1 - warmup)
    schedule = optax.join_schedules([up, down], [warmup])
    # One norm of all gradients clips them, and says whether one is not finite.
    return fp8.fused_adamw(schedule, b2=0.95, weight_decay=0.1, max_grad_norm=1.0, skip_nonfinite=True)


def compiler_options(recipe: str) -> dict[str, str] | None:
    """Options for the compiler of a step; None is what the library chooses.

    On the CPU, XLA multiplies the bfloat16 matrices of a weight's gradient in a plain loop, which makes a step of the
    tiny model four times as long, unless it is kept from handing products to its library for them.
    """
    if recipe != "bf16" or jax.default_backend() != "cpu":
        return None
    options = {"xla_cpu_experimental_ynn_fusion_type": ""}
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:  # another jaxlib, which does not know it
        return None
    return options
