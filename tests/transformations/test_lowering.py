"""What a layer asks of CUDA: the library's custom calls, in the numbers the design promises, and none of them on a CPU.

Lowering for a platform needs neither its compiler nor its device, nor the kernels. Per linear layer of a training step:
each of its three tensors is cast once, in both orientations, by the kernel of what comes before where there is one (a
norm, an activation or its gradient), and with the sums that are the bias gradient; there are three GEMMs; current
scaling measures each tensor first.
"""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_fp8 as fp8

DELAYED, CURRENT = fp8.DelayedScaling(amax_history_len=4), fp8.CurrentScaling()


pytestmark = pytest.mark.usefixtures("with_kernels")
RECIPES = [pytest.param(DELAYED, id="delayed", marks=pytest.mark.versions), pytest.param(CURRENT, id="current")]


def custom_calls(function, *args, platform: str = "cuda") -> Counter:
    """How often a lowered program reaches each of the library's custom calls, also through inner functions."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return count_custom_calls(text)


def count_custom_calls(text: str) -> Counter:
    name = r'@("[^"]*"|[\w.]+)'
    bodies = dict(re.findall(rf"func\.func (?:\w+ )?{name}(.*?)(?=func\.func|\Z)", text, flags=re.DOTALL))

    def count(function):
        found = Counter(re.findall(r"custom_call @(jax_fp8_\w+)", bodies[function]))
        for callee in re.findall(rf"\bcall {name}", bodies[function]):
            found += count(callee)
        return found

    return count("main")


def expected(recipe, **counts) -> Counter:
    """What is counted here, by names without the prefix; amaxes are measured by current scaling only."""
    wanted = {name: count for name, count in counts.items() if recipe == CURRENT or not name.endswith("amax")}
    return Counter({f"jax_fp8_{name}": count for name, count in wanted.items()})


def dense_and_its_gradient(recipe):
    layer = fp8.Dense(48, recipe=recipe)
    x = jax.ShapeDtypeStruct((80, 16), jnp.bfloat16)  # more rows than the kernel for few of them takes
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def forward(variables, x):
        return layer.apply(variables, x)

    def loss(variables, x):
        return jnp.sum(jnp.sin(forward(variables, x).astype(jnp.float32)))

    def gradient(variables, x):
        def of_params_and_input(given):
            return loss({**given, "params": given["params"]["layer"]}, given["params"]["x"])

        given = {**variables, "params": {"layer": variables["params"], "x": x}}
        return fp8.value_and_grad(of_params_and_input)(given)

    return forward, gradient, (variables, x)


@pytest.mark.parametrize("recipe", RECIPES)
def test_dense(recipe):
    forward, gradient, args = dense_and_its_gradient(recipe)
    # Forward only: nothing will want xᵀ, so x is cast in one orientation.
    assert custom_calls(forward, *args) == expected(recipe, gemm=1, quantize=1, quantize_transpose=1, amax=2)
    assert custom_calls(gradient, *args) == expected(
        recipe, gemm=3, quantize_transpose=2, quantize_transpose_sums=1, amax=3
    )


@pytest.mark.versions
def test_dense_in_bfloat16_has_none():
    forward, gradient, args = dense_and_its_gradient(None)
    assert not custom_calls(forward, *args) and not custom_calls(gradient, *args)


@pytest.mark.parametrize("recipe", RECIPES)
def test_cpu_has_none(recipe):
    forward, gradient, args = dense_and_its_gradient(recipe)
    assert not custom_calls(forward, *args, platform="cpu") and not custom_calls(gradient, *args, platform="cpu")


@pytest.mark.parametrize("recipe", RECIPES)
def test_gpt_loss_and_its_gradient(recipe):
    config = fp8.GPTConfig.preset("tiny", vocab_size=256, num_layers=2, max_seq_len=33)
    model = fp8.GPT(config, recipe=recipe)
    tokens = jax.ShapeDtypeStruct((3, 33), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    loss = fp8.next_token_loss(model)

    def of_layers(**counts):
        return expected(recipe, **{name: config.num_layers * count for name, count in counts.items()})

    # Four GEMMs: qkv and MLP up behind norms, MLP down behind an activation, the attention's output behind none of
    # ours. Queries, keys and values are three products.
    before = {"norm_quantize": 2, "norm_amax": 2, "activation_quantize": 1, "activation_amax": 1}
    forward = custom_calls(loss, variables, tokens)
    assert forward == of_layers(gemm=6, **before, quantize=1, quantize_transpose=4, amax=1 + 4)
    gradient = custom_calls(fp8.value_and_grad(loss), variables, tokens)
    after = {"norm_backward": 2, "activation_backward_quantize": 1, "activation_backward_amax": 1}
    layers = of_layers(
        gemm=6 + 8, **before, **after, quantize_transpose=1 + 4, quantize_transpose_sums=3, amax=1 + 4 + 3
    )
    assert gradient == layers + expected(recipe, cross_entropy=1, weight_gradient=1)  # a loss of one chunk


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_state_of_a_whole_model_is_one_call(recipe, microbatches):
    config = fp8.GPTConfig.preset("tiny", vocab_size=256, num_layers=2, max_seq_len=33)
    model, tx = fp8.GPT(config, recipe=recipe), optax.sgd(1e-3)
    tokens = jax.ShapeDtypeStruct((2, 33), jnp.int32)

    def create(tokens):
        return fp8.TrainState.create(variables=model.init(jax.random.key(0), tokens), tx=tx)

    step = fp8.make_train_step(fp8.next_token_loss(model), tx, recipe, microbatches)
    traced = step.trace(jax.eval_shape(create, tokens), tokens)
    for platform, calls in (("cuda", recipe == DELAYED), ("cpu", 0)):
        found = count_custom_calls(traced.lower(lowering_platforms=(platform,)).as_text())
        assert found["jax_fp8_update_state"] == calls


@pytest.mark.versions
def test_calls_through_inner_functions_are_counted():
    inner = jax.jit(lambda x: jax.ffi.ffi_call("jax_fp8_amax", jax.ShapeDtypeStruct((), jnp.float32))(x))
    twice = custom_calls(lambda x: inner(x) + inner(2 * x), jnp.ones((16, 16)))
    assert twice == Counter({"jax_fp8_amax": 2})


def gradient_of_a_layer():
    layer, x = fp8.Dense(48), jnp.ones((32, 16), jnp.bfloat16)
    variables = layer.init(jax.random.key(0), x)

    def gradient(variables, x):
        loss = fp8.value_and_grad(lambda v, x: jnp.sum(jnp.sin(layer.apply(v, x).astype(jnp.float32))))
        return loss(variables, x)

    return jax.jit(gradient), variables, x


@pytest.mark.versions
def test_a_program_is_exported_for_cuda_by_who_vouches_for_the_kernels():
    """jax asks, for it cannot know whether the kernels will mean the same when the program is loaded."""
    gradient, variables, x = gradient_of_a_layer()
    with pytest.raises(ValueError, match="jax_fp8_quantize"):
        jax.export.export(gradient, platforms=["cuda"])(variables, x)
    targets = set(custom_calls(gradient, variables, x))
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in targets]
    exported = jax.export.export(gradient, platforms=["cuda"], disabled_checks=checks)(variables, x)
    assert exported.platforms == ("cuda",) and "jax_fp8_gemm" in exported.mlir_module()


@pytest.mark.versions
def test_an_exported_program_computes_the_same():
    gradient, variables, x = gradient_of_a_layer()
    exported = jax.export.export(gradient, platforms=["cpu"])(variables, x)
    for mine, its in zip(*map(jax.tree.leaves, (gradient(variables, x), exported.call(variables, x))), strict=True):
        assert (mine == its).all()
