"""What the families of Hugging Face compute beside Llama, on a mesh: the loss and gradients of one device, in float32.

The model has three kinds of layers (windows, bases of rotary positions), the same ones on each stage of a pipeline.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import gpt, gradients_of, make_mesh, showing, tokens

import jax_fp8 as fp8

LLAMA = {
    "norm": "rmsnorm", "activation": "geglu", "positions": "rotary", "use_bias": False, "num_kv_heads": 2,
    "num_layers": 4,
}  # fmt: skip
GEMMA = LLAMA | {
    "sliding_window": 8, "windowed_layers": (0, 3), "window_rotary_base": 1e3, "unrotated_layers": (1, 4),
    "rotary_scaling": fp8.YarnScaling(factor=4.0, original_length=16), "rotary_fraction": 0.5, "qk_norm": True,
    "attention_scale": 0.3, "attention_logit_cap": 1.0, "logit_cap": 2.0, "norm_placement": "both",
    "zero_centered_scale": True, "embedding_multiplier": 8.0, "residual_multiplier": 0.5, "logit_divisor": 2.0,
    "use_mlp_bias": True, "num_layers": 6,
}  # fmt: skip
OLMO = LLAMA | {"norm_placement": "after", "qk_norm": True, "qk_norm_over": "all"}
CONFIGS = {"gemma": GEMMA, "olmo": OLMO}
TX = showing(optax.sgd(0.1))
CLOSE = 2e-5  # sums in another order


def model_of(name):
    return gpt(None, dtype=jnp.float32, **CONFIGS[name])


@functools.cache
def variables_of(name):
    """Params that are far from their first values: a norm whose scale were lost would be noticed."""
    params = jax.jit(model_of(name).init)(jax.random.key(0), tokens()[:, :-1])["params"]
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return jax.tree.unflatten(
        structure, [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    )


def stepped(name, parallel=None):
    step = fp8.make_train_step(fp8.next_token_loss(model_of(name)), TX, None, parallel=parallel, microbatches=2)
    state = fp8.TrainState.create(variables={"params": variables_of(name)}, tx=TX)
    state, metrics = step(step.place(state, tokens()) if parallel else state, tokens())
    return float(metrics["loss"]), jax.tree.map(np.asarray, gradients_of(state))


@functools.cache
def on_one_device(name):
    return stepped(name)


PARALLEL = {
    "fsdp 2": lambda: make_mesh(fsdp=2),
    "data 2, tensor 2": lambda: make_mesh(data=2, tensor=2),
    "tensor 2, sequence": lambda: fp8.Parallelism(make_mesh(tensor=2), sequence_parallel=True),
    "pipe 2": lambda: make_mesh(pipe=2),
}


@pytest.mark.parametrize(
    ("name", "mesh"), [*(("gemma", mesh) for mesh in PARALLEL), ("olmo", "fsdp 2"), ("olmo", "pipe 2")]
)
def test_a_step_is_that_of_one_device(name, mesh):
    (loss, gradients), (wanted_loss, wanted) = stepped(name, PARALLEL[mesh]()), on_one_device(name)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    for path, gradient in jax.tree_util.tree_leaves_with_path(wanted):
        found = dict(jax.tree_util.tree_leaves_with_path(gradients))[path]
        assert np.linalg.norm(gradient) > 0, path
        assert np.linalg.norm(found - gradient) < CLOSE * np.linalg.norm(gradient), path


def test_stages_of_a_pipeline_have_the_same_kinds_of_layers(monkeypatch):
    monkeypatch.setitem(CONFIGS, "uneven", LLAMA | {"sliding_window": 8, "windowed_layers": (0,)})
    with pytest.raises(
        ValueError, match="layers with the same number on their stages must compute the same, got layer_2"
    ):
        stepped("uneven", make_mesh(pipe=2))


def test_all_heads_of_a_token_cannot_be_split():
    with pytest.raises(
        ValueError, match='qk_norm_over="all" needs all heads of a token on one device, and the mesh axis'
    ):
        stepped("olmo", make_mesh(tensor=2))
