"""explain: every product is listed, with what it is and why."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.kernels import extension

X = jnp.ones((2, 16, 64), jnp.bfloat16)
FP8_TARGET = "jax_fp8_gemm" if extension.built() else "reference"


def gradient_of(module):
    variables = module.init(jax.random.key(0), X)
    return jax.grad(lambda p: module.apply({**variables, "params": p}, X).astype(jnp.float32).sum()), variables[
        "params"
    ]


def test_three_products_of_a_layer():
    module = fp8.Dense(32)
    variables = module.init(jax.random.key(0), X)
    gradient = jax.grad(
        lambda p, x: module.apply({**variables, "params": p}, x).astype(jnp.float32).sum(), argnums=(0, 1)
    )
    gemms = fp8.explain(gradient, variables["params"], X)
    assert [(gemm.m, gemm.k, gemm.n) for gemm in gemms] == [(32, 64, 32), (32, 32, 64), (64, 32, 32)]
    for gemm, name in zip(gemms, ("fprop", "dgrad", "wgrad"), strict=True):
        assert name in gemm.layer.split("/")
        assert gemm.is_fp8
        assert gemm.target == FP8_TARGET


@pytest.mark.parametrize("head_recipe", [None, fp8.CurrentScaling()], ids=["bf16", "fp8"])
def test_a_gpt_has_nothing_left_behind_but_attention_and_head(head_recipe):
    config = fp8.GPTConfig.preset("tiny", num_layers=2, hidden_size=64)
    model = fp8.GPT(config, head_recipe=head_recipe)
    tokens = jnp.ones((2, 17), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens[:, :-1])
    gemms = fp8.explain(fp8.value_and_grad(fp8.next_token_loss(model)), variables, tokens, strict=True)
    # Queries, keys and values are apart in the forward.
    assert sum(gemm.is_fp8 for gemm in gemms) == (6 + 4 + 4) * 2 + (3 if head_recipe else 0)
    head = set() if head_recipe else {"the head is kept in bfloat16"}
    reasons = {gemm.reason.split(",")[0] for gemm in gemms if not gemm.is_fp8}
    assert reasons == {"a batched product of activations"} | head
    assert "layer_1/mlp/down" in str(gemms)


def test_a_plain_head_is_three_products_on_a_gpu_too(with_kernels):
    model = fp8.GPT(fp8.GPTConfig.preset("tiny", num_layers=1))
    tokens = jax.ShapeDtypeStruct((2, 17), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    gemms = fp8.explain(fp8.value_and_grad(fp8.next_token_loss(model)), variables, tokens, strict=True)
    shapes = {(gemm.m, gemm.n, gemm.k) for gemm in gemms if gemm.reason == "the head is kept in bfloat16"}
    vocabulary, width = model.config.vocab_size, model.config.hidden_size
    assert {tuple(sorted(shape)) for shape in shapes} == {tuple(sorted((32, vocabulary, width)))} and len(shapes) == 3


@pytest.mark.parametrize("compiler_options", [None, {"xla_cpu_enable_fast_math": False}], ids=str)
def test_a_training_step_is_explained_without_running(compiler_options):
    """Also one with options for the compiler, as it has on a GPU:
    JAX refuses to trace such a function as part of another.
    """
    module, tx = fp8.Dense(64), fp8.fused_adam(1e-3)
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    state = jax.eval_shape(lambda v: fp8.TrainState.create(variables=v, tx=tx), variables)
    step = fp8.make_train_step(
        lambda v, x: jnp.mean(module.apply(v, x).astype(jnp.float32)),
        tx,
        module.recipe,
        2,
        compiler_options=compiler_options,
    )
    gemms = fp8.explain(step, state, X, strict=True)
    assert [gemm.count for gemm in gemms] == [2, 2, 2]  # once a microbatch
    assert [gemm.m for gemm in gemms] == [16, 16, 64]


@pytest.mark.parametrize(
    ("width", "tokens", "is_small"), [(1024, 2048, True), (1024, 8192, False), (2048, 2048, False), (2048, 256, True)]
)
def test_where_fp8_may_not_pay(width, tokens, is_small):
    module = fp8.LayerNormMLP(4 * width)
    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    variables = jax.eval_shape(module.init, jax.random.key(0), x)
    gemms = fp8.explain(module.apply, variables, x)
    assert gemms.is_small == is_small == ("FP8 may not pay here" in str(gemms))
    plain = fp8.LayerNormMLP(4 * width, recipe=None)
    assert not fp8.explain(plain.apply, {"params": variables["params"]}, x).is_small


def test_products_outside_the_library_are_named():
    module = nn.Sequential([fp8.Dense(32), nn.Dense(32)])
    gemms = fp8.explain(*gradient_of(module))
    outside = [gemm for gemm in gemms if not gemm.is_fp8]
    assert outside
    assert all("not made by a jax_fp8 layer" in gemm.reason for gemm in outside)
    with pytest.raises(ValueError, match="not made by a jax_fp8 layer"):
        fp8.explain(*gradient_of(module), strict=True)


def test_recipe_none_is_a_reason():
    with pytest.raises(ValueError, match="the layer has recipe=None"):
        fp8.explain(*gradient_of(fp8.Dense(32, recipe=None)), strict=True)


def test_loops_count():
    def loop(x, w):
        return jax.lax.scan(lambda c, _: (c @ w, None), x, length=5)[0]

    (gemm,) = fp8.explain(loop, jnp.ones((4, 8)), jnp.ones((8, 8)))
    assert gemm.count == 5
