"""The reference of a mixture of experts, in NumPy's float64: every expert computes every token, and each token's
weights sum the outputs. Nothing is sorted.
"""

import numpy as np

import jax_fp8 as fp8

DELAYED = fp8.DelayedScaling(amax_history_len=4)
RECIPES = {"delayed": DELAYED, "current": fp8.CurrentScaling(), "block": fp8.BlockScaling()}


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(logits) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def chosen_experts(logits, choices) -> np.ndarray:
    """The most likely experts of each token; of equally likely ones the first."""
    return np.argsort(-logits, axis=-1, kind="stable")[:, :choices]


def dense_weights(logits, choices, normalize=True) -> np.ndarray:
    """The weight of each expert for each token, (tokens, experts); 0 for experts that it does not go to."""
    weights = np.zeros(logits.shape)
    probabilities = softmax(logits)
    np.put_along_axis(weights, chosen_experts(logits, choices), 1, axis=-1)
    weights *= probabilities
    return weights / weights.sum(-1, keepdims=True) if normalize else weights


def balance_loss(logits, choices) -> float:
    experts = logits.shape[1]
    fractions = np.bincount(chosen_experts(logits, choices).reshape(-1), minlength=experts) / logits.shape[0] / choices
    return experts * float(fractions @ softmax(logits).mean(0))


def swiglu_mlp(x, gate, up, down) -> np.ndarray:
    """All experts on all tokens, (experts, tokens, features), of kernels (experts, in, out)."""
    x, gate, up, down = (np.asarray(array, np.float64) for array in (x, gate, up, down))
    return silu(x @ gate) * (x @ up) @ down
