"""FP8 training of Transformers in JAX on NVIDIA Hopper: Flax layers, an Optax transform, and one jitted step.

In the order in which data flows: formats and recipes, quantization, layers, the model, gradients with their amaxes, the
optimizer, the step.
"""

from jax_fp8.core.formats import E4M3, E5M2, HYBRID, Format
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.core.layered_loss import LayeredLoss, WholeBatchLoss
from jax_fp8.core.lora import Lora
from jax_fp8.core.maxima import by_maximum
from jax_fp8.core.recipe import BlockScaling, CurrentScaling, DelayedScaling
from jax_fp8.grads.delayed import backward_dw
from jax_fp8.inspect.capture import capture_report
from jax_fp8.inspect.explain import explain
from jax_fp8.kernels.gemm import matmul
from jax_fp8.kernels.quantize import quantize
from jax_fp8.kernels.update_state import count_amaxes, update_state
from jax_fp8.models.config import GPTConfig
from jax_fp8.models.generate import generate
from jax_fp8.models.gpt import GPT
from jax_fp8.models.huggingface.peft import load_adapters, save_adapters
from jax_fp8.models.huggingface.weights import load_huggingface, save_huggingface
from jax_fp8.models.loss import next_token_loss
from jax_fp8.models.params_file import load_config, load_params, save_params
from jax_fp8.nn.attention import SelfAttention
from jax_fp8.nn.block import TransformerBlock
from jax_fp8.nn.cross_attention import CrossAttention
from jax_fp8.nn.dense import Dense, LayerNormDense
from jax_fp8.nn.dot_general import DotGeneral
from jax_fp8.nn.mlp import LayerNormMLP
from jax_fp8.nn.moe import LayerNormMoE
from jax_fp8.ops.dot_general import dot_general, einsum, init_state
from jax_fp8.ops.rotary_scaling import DynamicScaling, LinearScaling, LongRopeScaling, RotaryScaling, YarnScaling
from jax_fp8.optim.balance import balance_experts
from jax_fp8.optim.freeze import freeze
from jax_fp8.optim.fused_adam import fused_adam, fused_adamw
from jax_fp8.optim.updates import InPlace, apply_updates
from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.parallel.names import rules_from_names
from jax_fp8.state.frozen_kernels import freeze_kernels, merge_adapters
from jax_fp8.state.train_state import TrainState
from jax_fp8.state.weight_cache import cast_weights
from jax_fp8.train.custom_loop import shardings, value_and_grad, warm_start
from jax_fp8.train.diagnostics import Diagnostics
from jax_fp8.train.faults import find_fault
from jax_fp8.train.train_step import make_train_step
from jax_fp8.tune.gemm_table import GemmTable, tuned_gemms
from jax_fp8.tune.tune import tune

__version__ = "0.1.0"

__all__ = [
    "E4M3",
    "E5M2",
    "GPT",
    "HYBRID",
    "BlockScaling",
    "CrossAttention",
    "CurrentScaling",
    "DelayedScaling",
    "Dense",
    "Diagnostics",
    "DotGeneral",
    "DynamicScaling",
    "Format",
    "Fp8Array",
    "GPTConfig",
    "GemmTable",
    "InPlace",
    "LayerNormDense",
    "LayerNormMLP",
    "LayerNormMoE",
    "LayeredLoss",
    "LinearScaling",
    "LongRopeScaling",
    "Lora",
    "Parallelism",
    "RotaryScaling",
    "SelfAttention",
    "TrainState",
    "TransformerBlock",
    "WholeBatchLoss",
    "YarnScaling",
    "apply_updates",
    "backward_dw",
    "balance_experts",
    "by_maximum",
    "capture_report",
    "cast_weights",
    "count_amaxes",
    "dot_general",
    "einsum",
    "explain",
    "find_fault",
    "freeze",
    "freeze_kernels",
    "fused_adam",
    "fused_adamw",
    "generate",
    "init_state",
    "load_adapters",
    "load_config",
    "load_huggingface",
    "load_params",
    "make_train_step",
    "matmul",
    "merge_adapters",
    "next_token_loss",
    "quantize",
    "rules_from_names",
    "save_adapters",
    "save_huggingface",
    "save_params",
    "shardings",
    "tune",
    "tuned_gemms",
    "update_state",
    "value_and_grad",
    "warm_start",
]
