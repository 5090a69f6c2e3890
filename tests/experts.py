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


def scores_of(logits, scores="softmax") -> np.ndarray:
    return softmax(logits) if scores == "softmax" else 1 / (1 + np.exp(-logits))


def chosen_experts(
    logits, choices, scores="softmax", bias=0.0, groups=1, groups_per_token=1, group_score_experts=2
) -> np.ndarray:
    """The experts of each token with the highest scores; of equal ones the first. Groups are chosen before."""
    chosen = []
    for preferences in scores_of(logits, scores) + bias:
        members = np.split(np.arange(len(preferences)), groups)
        totals = [np.sort(preferences[own])[::-1][:group_score_experts].sum() for own in members]
        best = np.argsort(-np.array(totals), kind="stable")[:groups_per_token]
        allowed = np.sort(np.concatenate([members[group] for group in best]))
        chosen.append(allowed[np.argsort(-preferences[allowed], kind="stable")[:choices]])
    return np.array(chosen)


def dense_weights(logits, choices, normalize=True, scale=1.0, scores="softmax", **rule) -> np.ndarray:
    """The weight of each expert for each token, (tokens, experts); 0 for experts that it does not go to."""
    weights = np.zeros(logits.shape)
    np.put_along_axis(weights, chosen_experts(logits, choices, scores, **rule), 1, axis=-1)
    weights *= scores_of(logits, scores)
    return scale * (weights / weights.sum(-1, keepdims=True) if normalize else weights)


def balance_loss(logits, choices, scores="softmax", **rule) -> float:
    experts = logits.shape[1]
    chosen = chosen_experts(logits, choices, scores, **rule)
    fractions = np.bincount(chosen.reshape(-1), minlength=experts) / logits.shape[0] / choices
    shares = scores_of(logits, scores)
    return experts * float(fractions @ (shares / shares.sum(-1, keepdims=True)).mean(0))


def swiglu_mlp(x, gate, up, down) -> np.ndarray:
    """All experts on all tokens, (experts, tokens, features), of kernels (experts, in, out)."""
    x, gate, up, down = (np.asarray(array, np.float64) for array in (x, gate, up, down))
    return silu(x @ gate) * (x @ up) @ down
