"""The optimizer of a run: AdamW in one kernel, which also clips gradients, and the schedule of the learning rate.

warmup ↗ peak ─ linear, cosine ↘ final, constant →, or warmup-stable-decay → then ↘ final
"""

import math
import re

import optax

from jax_fp8.core.lora import LORA_A, LORA_B
from jax_fp8.core.paths import CORRECTION_BIAS
from jax_fp8.models.config import GPTConfig
from jax_fp8.optim.balance import balance_experts
from jax_fp8.optim.freeze import freeze
from jax_fp8.optim.fused_adam import fused_adamw
from jax_fp8.run.settings import Settings


def make_optimizer(settings: Settings, model: GPTConfig) -> optax.GradientTransformationExtraArgs:
    """The optimizer that the settings describe; `fused_adamw` raises a ValueError for numbers that Adam cannot have.

    It sees the params alone that are trained: with --lora the adapters, with --freeze what its rule leaves. Correction
    biases of routers follow the load of experts.
    """
    adam = fused_adamw(
        learning_rate_schedule(settings),
        settings.b1,
        settings.b2,
        settings.eps,
        settings.weight_decay,
        mu_dtype=settings.mu_dtype,
        nu_dtype=settings.nu_dtype,
        max_grad_norm=settings.max_grad_norm or None,  # the norm also shows whether any gradient is not finite
        skip_nonfinite=True,
    )
    if settings.lora:
        return freeze(adam, trained=f"/({LORA_A}|{LORA_B})$")
    tx = balance_experts(adam) if _trains_correction_biases(settings, model) else adam
    return freeze(tx, settings.freeze) if settings.freeze else tx


def _trains_correction_biases(settings: Settings, model: GPTConfig) -> bool:
    if not model.router_correction_bias:
        return False
    routers = [i for i in range(model.num_layers) if model.layer_fields(i)["num_experts"]]
    paths = [f"layer_{index}/mlp/router/{CORRECTION_BIAS}" for index in routers]
    return not all(settings.freeze and re.search(settings.freeze, path) for path in paths)


def learning_rate_schedule(settings: Settings) -> optax.Schedule:
    """The learning rate by step, counted from 0. The decay reaches its end one step after the last one, so the last
    step still learns when the end is 0.
    """
    check_schedule(settings)
    steps, peak, final = settings.steps, settings.learning_rate, settings.final_learning_rate
    warmup = max(1, min(steps // 10, 200)) if settings.warmup_steps is None else settings.warmup_steps
    pieces = [optax.linear_schedule(peak / warmup, peak, warmup)] if warmup else []
    starts = [warmup] if warmup else []
    if settings.decay == "warmup-stable-decay":
        decay = min(max(1, steps // 5) if settings.decay_steps is None else settings.decay_steps, steps - warmup)
        pieces.append(optax.constant_schedule(peak))
        starts.append(steps - decay)
    else:
        decay = steps - warmup
    if settings.decay == "constant":
        pieces.append(optax.constant_schedule(peak))
    elif settings.decay == "cosine":
        pieces.append(optax.cosine_decay_schedule(peak, decay + 1, alpha=final / peak))
    else:
        pieces.append(optax.linear_schedule(peak, final, decay + 1))
    return optax.join_schedules(pieces, starts)


def check_schedule(settings: Settings) -> None:
    """Raise a ValueError of one sentence unless the options of the learning rate fit together."""
    peak, final = settings.learning_rate, settings.final_learning_rate
    if not 0 < peak < math.inf:
        raise ValueError(f"--learning-rate must be a positive number, got {peak}")
    if not 0 <= final <= peak:
        raise ValueError(f"--final-learning-rate must be from 0 to --learning-rate {peak}, got {final}")
    if final and settings.decay == "constant":
        raise ValueError(f"--final-learning-rate needs a decay, got {final} with --decay constant; leave one out")
    if settings.warmup_steps is not None and not 0 <= settings.warmup_steps < settings.steps:
        raise ValueError(
            f"--warmup-steps must be from 0 to below --steps {settings.steps}, got {settings.warmup_steps}"
        )
    if settings.decay_steps is None:
        return
    if settings.decay != "warmup-stable-decay":
        raise ValueError(f"--decay-steps is for --decay warmup-stable-decay, got --decay {settings.decay}")
    most = settings.steps - (settings.warmup_steps or 0)
    if not 1 <= settings.decay_steps <= most:
        raise ValueError(f"--decay-steps must be from 1 to the {most} steps after warmup, got {settings.decay_steps}")
