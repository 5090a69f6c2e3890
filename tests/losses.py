"""The oracle of the loss of rows of logits, in NumPy's float64; it shares no code with the library."""

import numpy as np


def cross_entropy(logits, labels, shares, z_loss) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The gradient of the logits (..., vocab), the losses and the log-sum-exps (...), for labels and shares (...)."""
    x, share = np.asarray(logits).astype(np.float64), np.asarray(shares).astype(np.float64)[..., None]
    labels, z_loss = np.asarray(labels)[..., None], np.float64(z_loss)
    largest = x.max(axis=-1, keepdims=True, initial=-np.inf)
    lse = np.log(np.exp(x - largest).sum(axis=-1, keepdims=True)) + largest
    chosen = np.take_along_axis(x, labels, axis=-1)
    gradient = share * np.exp(x - lse) * (1 + 2 * z_loss * lse)
    np.put_along_axis(gradient, labels, np.take_along_axis(gradient, labels, axis=-1) - share, axis=-1)
    return gradient, (share * (lse - chosen + z_loss * lse**2))[..., 0], lse[..., 0]
