"""Steps on meshes of models whose heads are as Qwen's: of their own width, with norms and with biases of projections
alone, turned by scaled angles. The gradient of a norm of heads is a sum over the devices that have the heads.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import assert_close, first_state, gpt, gradients_of, significant, tokens, train
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.core.shards import ParamSharding

QWEN = {
    "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "num_kv_heads": 2, "use_bias": False,
    "tie_embeddings": False, "rotary_base": 5e5, "norm_epsilon": 1e-5, "head_dim": 64, "use_qkv_bias": True,
    "rotary_scaling": fp8.RotaryScaling(factor=8.0, original_length=16), "qk_norm": True, "num_layers": 1,
}  # fmt: skip
DELAYED = fp8.DelayedScaling(amax_history_len=2)
ROUNDED, NOISE = 1e-4, 0.25  # of sums in float32; of FP8
# The recipe, the mesh, and what else.
CASES = {
    "heads apart": (None, {"data": 2, "tensor": 2}, {}),
    "fewer keys than devices": (None, {"tensor": 4}, {}),
    "by rows": (None, {"tensor": 2}, {"sequence_parallel": True}),
    "a rule": (None, {"tensor": 2}, {"rules": [("_norm/", P())]}),
    "delayed": (DELAYED, {"fsdp": 2, "tensor": 2}, {"sequence_parallel": True}),
    "current, fsdp": (fp8.CurrentScaling(), {"fsdp": 2}, {}),
    "delayed, a pipeline": (DELAYED, {"pipe": 2, "tensor": 2}, {"microbatches": 2}),
}
SLOW = {"a rule", "current, fsdp", "delayed, a pipeline"}


def step_of(recipe, axes, options):
    """Gradients of the first step, on one device and on a mesh."""
    layers = 2 if "pipe" in axes else 1
    model = gpt(recipe, **QWEN | {"num_layers": layers}, dtype=jnp.bfloat16 if recipe else jnp.float32)
    state, loss_fn = first_state(model.init, tokens()[:, :-1]), fp8.next_token_loss(model)
    on_one = {name: value for name, value in options.items() if name == "microbatches"}
    (of_one, losses), (ours, others) = (
        train(loss_fn, state, tokens(), recipe, axes=each, **chosen)
        for each, chosen in ((None, on_one), (axes, options))
    )
    np.testing.assert_allclose(others[0], losses[0], 1e-3 if recipe else 1e-5)
    return significant(gradients_of(ours[0])), significant(gradients_of(of_one[0]))


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
def test_gradients_are_those_of_one_device(case):
    recipe, axes, options = CASES[case]
    ours, of_one = step_of(recipe, axes, options)
    assert all(np.any(gradient) for gradient in of_one.values()) and sum("query_norm" in name for name in of_one)
    assert_close(ours, of_one, NOISE if recipe else ROUNDED)


def test_a_sum_that_is_left_out_would_be_noticed(monkeypatch):
    """Negative control."""
    monkeypatch.setattr("jax_fp8.nn.dense.ParamSharding", lambda dim=None, is_shared=False: ParamSharding(dim))
    ours, of_one = step_of(*CASES["heads apart"])
    wrong = {name for name, gradient in of_one.items() if not np.allclose(ours[name], gradient, rtol=1e-2, atol=1e-7)}
    assert {name.split("'")[-4] for name in wrong} == {"query_norm", "key_norm"}
