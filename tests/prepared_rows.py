"""Products of few rows that the kernel itself normalizes, casts and activates, and what each must make of its operands.

Numbers are chosen so that the statistics of a row are exact, whatever the order of their sums: its elements are small
integers, and the mean of those of LayerNorm is one, too. So the prepared rows are known to the bit, and the product is
compared as that of any rows.
"""

import math

import numpy as np
from emulation import Result
from few_rows import BF16, E4M3, F32, Product
from reference import quantize

# In the order of Activation, and by name whether it is gated.
ACTIVATIONS = ["gelu", "gelu_exact", "silu", "relu", "squared_relu"]
GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
EPSILON = 0.5


def activation_of(name, x):
    """In float64."""
    if name == "gelu":
        return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "gelu_exact":
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    if name == "silu":
        return x * 0.5 * (1 + np.tanh(x / 2))
    return np.maximum(x, 0) ** (2 if name == "squared_relu" else 1)


class PreparedProduct(Product):
    """Arguments as those of `Product`, and

    norm: "layernorm", "rmsnorm" or "".
    casts: to E4M3; else the product is of bfloat16.
    activation: of the result, or None.

    The device is by default one without warpgroups, where weights come in boxes.
    """

    def __init__(
        self, m, n, k, *, norm="", casts=True, activation=None, pair=None, d=F32, alpha=1.0, device="10.0", **how
    ):
        super().__init__(m, n, k, pair or ("" if casts else "bfloat16"), d=d, alpha=alpha, device=device, **how)
        self.norm, self.casts, self.activation = norm, casts, activation
        random = np.random.default_rng([m, n, k, 1])
        half = random.integers(-3, 4, (m, k // 2))
        mean = 2 if norm == "layernorm" else 0
        self.x = (np.concatenate([half, -half[:, ::-1]], axis=1) + mean).astype(BF16)
        self.norm_scale, self.norm_bias = random.normal(size=(2, k)).astype(np.float32)
        self.prepare()

    def prepare(self):
        """Find the rows as they are multiplied."""
        x = self.x.astype(np.float32)
        if self.norm == "layernorm":
            x = x - np.mean(x, axis=1, keepdims=True, dtype=np.float32)
        if self.norm:
            squares = np.sum(x * x, axis=1, keepdims=True, dtype=np.float32) / np.float32(self.shape[2])
            rstd = np.float32(1) / np.sqrt(squares + np.float32(EPSILON))
            bias = self.norm_bias.astype(np.float64) if self.norm == "layernorm" else 0
            x = (x * rstd).astype(np.float64) * self.norm_scale.astype(np.float64) + bias  # then rounded once: fma
            x = x.astype(np.float32).astype(BF16)
        self.a = quantize(x, E4M3, self.a_scale)[0] if self.casts else x.astype(BF16)

    def given(self):
        return self.x

    @property
    def gated(self):
        return self.activation in GATED

    def result(self):
        m, n, _ = self.shape
        return Result((m, n // 2 if self.gated else n), self.d if self.d_scale is None else E4M3)

    def around(self):
        name = GATED.get(self.activation, self.activation)
        settings = [bool(self.norm), self.casts, EPSILON, ACTIVATIONS.index(name) if name else -1, self.gated]
        return settings, [self.norm_scale if self.norm else None, self.norm_bias if self.norm == "layernorm" else None]

    def fits(self, d):
        if self.activation is None:
            return super().fits(d)
        expected, magnitudes = self.expected()
        eps = float(np.finfo(np.float32).eps) if self.d == F32 else 2.0**-7
        allowed = magnitudes * 2.0**-18 + abs(expected) * eps
        name = GATED.get(self.activation, self.activation)
        if not self.gated:
            values, slopes = activation_of(name, expected), self.slope(name, expected)
            return abs(d.astype(np.float64) - values) <= allowed * slopes + abs(values) * eps * 4 + 2.0**-24
        (gate, linear), (of_gate, of_linear) = np.split(expected, 2, axis=1), np.split(allowed, 2, axis=1)
        values = activation_of(name, gate)
        error = of_gate * self.slope(name, gate) * abs(linear) + of_linear * abs(values)
        return abs(d.astype(np.float64) - values * linear) <= error + abs(values * linear) * eps * 4 + 2.0**-24

    @staticmethod
    def slope(name, x):
        """A bound of the derivative near x."""
        return 2 * abs(x) + 1 if name == "squared_relu" else 1.2

    def check_exact(self, *how):
        """Sums of prepared rows are not exact."""
        self.check(*how)
