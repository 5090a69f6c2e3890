"""Rules that split params over `tensor` in every way: what comes out are the numbers of one device, or one sentence."""

import itertools
import re

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import assert_close, first_state, gradients_of, make_mesh, significant, train
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.core.paths import map_with_names
from jax_fp8.distributed.mesh_pass import MeshPass
from jax_fp8.parallel.mesh import Parallelism

PLAIN = {"recipe": None, "dtype": jnp.float32, "bias_init": nn.initializers.normal(1.0)}
WHOLE, COLUMNS, ROWS, SPLIT = P(), P(None, "tensor"), P("tensor", None), P("tensor")
X = np.random.default_rng(0).normal(size=(4, 16, 32)).astype(np.float32)


class Two(nn.Module):
    up: str | None = None
    down: str | None = None
    norm: bool = False

    @nn.compact
    def __call__(self, x):
        first = fp8.LayerNormDense if self.norm else fp8.Dense
        x = nn.relu(first(64, tensor_split=self.up, name="up", **PLAIN)(x))
        return fp8.Dense(32, tensor_split=self.down, name="down", **PLAIN)(x)


def squares(model):
    return lambda variables, x: jnp.mean(jnp.square(model.apply(variables, x) - 1))


def own_rules(params):
    """Every rule of one param, and every two of a kernel and its bias."""
    kernels, vectors = (WHOLE, COLUMNS, ROWS), (WHOLE, SPLIT)
    paths = []
    map_with_names(lambda path, leaf: paths.append(("/".join(path), leaf.ndim)), params)
    for path, ndim in paths:
        yield from ([(f"^{path}$", spec)] for spec in (vectors if ndim == 1 else kernels))
    for path, ndim in paths:
        if ndim > 1:
            bias = path.replace("kernel", "bias")
            yield from (
                [(path, of_kernel), (bias, of_bias)] for of_kernel, of_bias in itertools.product(kernels, vectors)
            )


# A model, rules beside those of single params and layers, and how many placements there are that are not refused.
MODELS = {
    "whole": (Two(), [[("up/kernel", COLUMNS), ("up/bias", SPLIT), ("down/kernel", ROWS)]], 2),
    "columns and rows": (Two("columns", "rows"), [[("", WHOLE)]], 2),
    "norm": (Two("columns", "rows", norm=True), [[("", WHOLE)]], 2),
    "MLP": (fp8.LayerNormMLP(64, **PLAIN), [[("", WHOLE)]], 2),
    "gated MLP": (fp8.LayerNormMLP(64, activation="swiglu", **PLAIN), [[("", WHOLE)], [("gate|up", WHOLE)]], 2),
    "attention": (fp8.SelfAttention(4, norm="layernorm", **PLAIN), [[("key|value", WHOLE)], [("", WHOLE)]], 4),
}  # fmt: skip


SLOW = ("norm", "MLP")  # "columns and rows" and "gated MLP" are like them


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in MODELS]
)
def test_every_rule_is_right_or_refused_in_a_sentence(case):
    model, others, expected = MODELS[case]
    state, loss_fn = first_state(model.init, X), squares(model)
    accepted, refused = {}, 0
    for rules in [[], *own_rules(state.params), *others]:
        try:
            parallel = Parallelism(make_mesh(tensor=2), rules)
            on_mesh = MeshPass.from_state(parallel, loss_fn, None, once=True, state=state, batch=X).settled(state, X)
        except ValueError as refusal:  # and nothing else: an error of Flax is none
            assert re.search(r"must|needs", str(refusal)) and "; " in str(refusal) and "\n" not in str(refusal)
            refused += 1
        else:
            accepted[str(on_mesh.placement.specs)] = rules
    assert len(accepted) == expected and refused >= len(accepted)
    (of_one, *_), losses = train(loss_fn, state, X, None)
    for rules in accepted.values():
        (ours, *_), own_losses = train(loss_fn, state, X, None, axes={"tensor": 2}, rules=rules)
        np.testing.assert_allclose(own_losses, losses, 1e-5)
        assert_close(significant(gradients_of(ours)), significant(gradients_of(of_one)), 1e-4)
