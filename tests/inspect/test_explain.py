"""explain: every product is listed, with what it is and why."""

import re
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.core.fp8_array import Fp8Array
from jax_fp8.inspect.matrix_product import kinds
from jax_fp8.kernels import chain, dispatch, extension, few_rows_gemm

# Which test gets this warning, said once a process, depends on their order.
pytestmark = pytest.mark.filterwarnings("ignore:delayed scaling is differentiated without")

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


@pytest.mark.skipif(not extension.built(), reason="the extension has no kernels")
def test_products_of_few_rows_say_their_kernel(with_kernels, monkeypatch):
    monkeypatch.setattr(few_rows_gemm, "KERNEL_ROWS", 32)
    monkeypatch.setattr(few_rows_gemm, "MOST_ROWS", 32)
    module = fp8.Dense(32)
    variables = module.init(jax.random.key(0), X)
    found = [fp8.explain(module.apply, variables, jnp.concatenate([X] * times)) for times in (1, 2)]
    assert [[gemm.target for gemm in gemms] for gemms in found] == [["jax_fp8_few_rows_gemm"], ["jax_fp8_gemm"]]
    assert "FP8 weights by the kernel for few rows" in str(found[0])


@pytest.mark.skipif(not extension.built(), reason="the extension has no kernels")
def test_products_in_chains_are_found(with_kernels, monkeypatch):
    model = fp8.GPT(fp8.GPTConfig.preset("tiny", num_layers=2, hidden_size=64))
    prompt = jnp.ones((2, 48), jnp.int32)  # more than the kernel for few rows takes
    variables = jax.eval_shape(model.init, jax.random.key(0), prompt)
    shapes = []
    for chains in (False, True):
        monkeypatch.setattr(chain, "CHOSEN", chains)
        write = jax.jit(lambda variables: fp8.generate(model, variables, prompt, max_new_tokens=4))
        shapes.append([(gemm.layer, gemm.shape, gemm.target) for gemm in fp8.explain(write, variables)])
    assert shapes[0] == shapes[1]
    assert sum(target == few_rows_gemm.TARGET for _, _, target in shapes[1]) == 2 * 4
    assert chain.TARGET in str(jax.make_jaxpr(write)(variables)), "which it would miss"


@pytest.mark.parametrize("head_recipe", [None, fp8.CurrentScaling()], ids=["bf16", "fp8"])
def test_a_gpt_has_nothing_left_behind_but_attention_and_head(head_recipe):
    config = fp8.GPTConfig.preset("tiny", num_layers=2, hidden_size=64)
    model = fp8.GPT(config, head_recipe=head_recipe)
    tokens = jnp.ones((2, 17), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens[:, :-1])
    gemms = fp8.explain(fp8.value_and_grad(fp8.next_token_loss(model)), variables, tokens)
    assert all(gemm.is_fp8 or gemm.by_design for gemm in gemms)
    # Queries, keys and values are apart in the forward.
    assert sum(gemm.is_fp8 for gemm in gemms) == (6 + 4 + 4) * 2 + (3 if head_recipe else 0)
    head = set() if head_recipe else {"the head is kept in bfloat16"}
    reasons = {gemm.reason.split(",")[0] for gemm in gemms if not gemm.is_fp8}
    assert reasons == {"a batched product of activations"} | head
    assert "layer_{0..1}/mlp/down" in str(gemms)


def test_a_plain_head_is_three_products_on_a_gpu_too(with_kernels):
    model = fp8.GPT(fp8.GPTConfig.preset("tiny", num_layers=1))
    tokens = jax.ShapeDtypeStruct((2, 17), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    gemms = fp8.explain(fp8.value_and_grad(fp8.next_token_loss(model)), variables, tokens)
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
    gemms = fp8.explain(step, state, X)
    assert all(gemm.is_fp8 for gemm in gemms)
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


@pytest.fixture
def on_a_gpu(monkeypatch, traced_anew):
    """What a machine with kernels and a Hopper GPU says of itself; a test changes a part of it."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "kernels_run", lambda: True)
    monkeypatch.setattr(dispatch, "too_old_gpu", lambda: None)
    monkeypatch.setattr(extension, "missing_reason", lambda: None)
    return monkeypatch


def test_products_outside_the_library_are_named(on_a_gpu):
    module = nn.Sequential([fp8.Dense(32), nn.Dense(48)])
    gemms = fp8.explain(*gradient_of(module))
    outside = [gemm for gemm in gemms if not gemm.is_fp8]
    assert outside
    assert all("not made by a jax_fp8 layer" in gemm.reason for gemm in outside)
    with pytest.raises(ValueError, match=r"not made by a jax_fp8 layer.*layers_1.* \(32, 32\) · \(32, 48\)"):
        fp8.explain(*gradient_of(module), strict=True)


def test_what_is_in_bfloat16_by_choice_passes_strict(on_a_gpu):
    gemms = fp8.explain(*gradient_of(nn.Sequential([fp8.Dense(32), fp8.Dense(32, recipe=None)])), strict=True)
    plain = [gemm for gemm in gemms if not gemm.is_fp8]
    assert plain and all(gemm.by_design and "recipe=None" in gemm.reason for gemm in plain)


def test_embedding_attention_and_a_plain_head_pass_strict(with_kernels, monkeypatch):
    model = fp8.GPT(fp8.GPTConfig.preset("tiny", num_layers=1, hidden_size=64))
    tokens = jnp.ones((2, 16), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    traced = jax.jit(model.apply).trace(variables, tokens)  # where attention is made of products, and not by cuDNN
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gemms = fp8.explain(types.SimpleNamespace(trace=lambda *args: traced), variables, tokens, strict=True)
    assert {gemm.reason[:12] for gemm in gemms if not gemm.is_fp8} == {"a batched pr", "the head is "}


def test_strict_without_a_gpu_names_the_platform(on_a_gpu):
    on_a_gpu.setattr(jax, "default_backend", lambda: "cpu")
    module = fp8.Dense(32)
    with pytest.raises(ValueError, match=r"strict needs an NVIDIA GPU.* got the platform 'cpu'"):
        fp8.explain(*gradient_of(module), strict=True)
    fp8.explain(*gradient_of(fp8.Dense(32, recipe=None)), strict=True)  # asks for no kernel


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [(extension, "missing_reason", "built without CUDA kernels"), (dispatch, "too_old_gpu", "this GPU has 8.0")],
    ids=["no kernels", "old GPU"],
)
def test_strict_says_why_kernels_do_not_run(module, name, reason, on_a_gpu):
    on_a_gpu.setattr(dispatch, "kernels_run", lambda: False)
    on_a_gpu.setattr(module, name, lambda: reason)
    gemms = fp8.explain(*gradient_of(fp8.Dense(48)))
    assert {gemm.target for gemm in gemms} == {"reference"} and str(gemms).count(reason) == 1
    with pytest.raises(ValueError, match=rf"got 3 of 3 .*{reason}.*Dense/fprop \(32, 64\) · \(64, 48\), "):
        fp8.explain(*gradient_of(fp8.Dense(48)), strict=True)


def test_strict_says_that_other_tiles_have_no_kernels(on_a_gpu):
    def tiled(x, w):
        a, b = (Fp8Array(array.astype(fp8.E4M3), jnp.ones((array.shape[0], 2))) for array in (x, w))
        return fp8.matmul(a, b)

    on_a_gpu.setattr(dispatch, "_warn_of_reference", lambda: None)
    with pytest.raises(ValueError, match="by the reference: kernels know the tiles of BlockScaling"):
        fp8.explain(tiled, jnp.ones((16, 128)), jnp.ones((32, 128)), strict=True)


def test_an_odd_dim_names_the_layer_and_the_size():
    module = nn.Sequential([fp8.Dense(32), fp8.Dense(20)])
    with pytest.raises(ValueError, match="layers_1: FP8 needs out features divisible by 16, got 20"):
        fp8.explain(module.init_with_output, jax.random.key(0), X, strict=True)


def test_equal_layers_share_a_row():
    config = fp8.GPTConfig.preset("tiny", num_layers=6, hidden_size=32, num_heads=2)
    model, tokens = fp8.GPT(config), jnp.ones((2, 17), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens[:, :-1])
    gemms = fp8.explain(fp8.value_and_grad(fp8.next_token_loss(model)), variables, tokens)
    table = str(gemms).splitlines()
    assert len(gemms) > 6 * 15 and len(table) <= 25
    (row,) = (line for line in table if "query+key+value/fprop" in line)
    assert re.fullmatch(r"FP8  x18 +\(32, 32\) · \(32, 32\) +e4m3fn e4m3fn .*layer_{0\.\.5}/attention/\S+", row)
    assert sum(kind.count for kind in kinds(gemms)) == sum(gemm.count for gemm in gemms)


def test_what_shards_send_is_listed_below_the_products():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))

    def local(x, w):
        return jax.lax.psum_scatter(x @ w, "tensor", tiled=True), jax.lax.pmax(jnp.max(x), "data")

    shapes = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    split = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    explained, alone = fp8.explain(split, *shapes), fp8.explain(lambda x, w: x @ w, *shapes)
    assert [(each.name, each.wire_bytes) for each in explained.collectives] == [
        ("psum_scatter", 2**20 * 3 // 4),
        ("pmax", 2),
    ]
    assert explained.wire_bytes == 2**20 * 3 // 4 + 2
    assert (alone.collectives, alone.wire_bytes) == ((), 0)
    *products, title, _, scatter, maximum = str(explained).splitlines()
    assert products == str(alone).splitlines()
    assert title == "over the wire, a device sends 0.75 MiB a call:"
    assert scatter.split() == ["x1", "psum_scatter", "(512,", "1024)", "bfloat16", "tensor", "4", "0.75"]
    assert maximum.split()[-1] == "0.00"


def test_loops_count():
    def loop(x, w):
        return jax.lax.scan(lambda c, _: (c @ w, None), x, length=5)[0]

    (gemm,) = fp8.explain(loop, jnp.ones((4, 8)), jnp.ones((8, 8)))
    assert gemm.count == 5
