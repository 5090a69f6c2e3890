"""Kernels that are frozen in FP8: the numbers of a model that casts the same kernels in every step, in half the bytes
of bfloat16 and with nothing else stored.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import reference

import jax_fp8 as fp8
from jax_fp8.core.lora import LORA_B
from jax_fp8.core.paths import map_with_names

CONFIG = fp8.GPTConfig.preset("tiny-llama", num_layers=2, hidden_size=64, mlp_hidden_size=96, num_heads=4)
LORA = fp8.Lora(rank=4, alpha=8)
TOKENS = np.random.default_rng(0).integers(0, 256, (4, 33)).astype(np.int32)
INPUTS = TOKENS[:, :-1]
RECIPES = {"delayed": fp8.DelayedScaling(), "current": fp8.CurrentScaling(), "block": fp8.BlockScaling()}


def model_of(recipe, lora=LORA, **options):
    return fp8.GPT(CONFIG, recipe=recipe, lora=lora, param_dtype=jnp.bfloat16, **options)


def variables_of(model):
    """With adapters that change something."""
    variables = jax.jit(model.init)(jax.random.key(0), INPUTS)

    def draw(names, param):
        is_second = names[-1] == LORA_B
        return (0.1 * jax.random.normal(jax.random.key(1), param.shape)).astype(param.dtype) if is_second else param

    return {**variables, "params": map_with_names(draw, variables["params"])}


def frozen(model, variables, **options):
    return fp8.freeze_kernels(variables, model.recipe, forward=lambda v: model.apply(v, INPUTS), **options)


def adapters(tree):
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat if "lora_" in path[-1].key}


@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_same_bits_as_kernels_that_every_step_casts(recipe, remat):
    """Both scale a kernel by its own amax: loss and gradients of adapters are equal, bit for bit."""
    model = model_of(RECIPES[recipe], remat=remat)
    variables = variables_of(model)
    gradient = jax.jit(fp8.value_and_grad(lambda v: fp8.next_token_loss(model)(v, TOKENS)))
    loss, grads, _ = gradient(variables)
    # Kernels side by side have scales of their own by tile only where tiles are whole; a joint scale holds for all.
    frozen_loss, frozen_grads, _ = gradient(frozen(model, variables))
    reference.assert_same_bits(frozen_loss, loss)
    expected, found = adapters(grads), adapters(frozen_grads)
    assert expected.keys() == found.keys() and len(found) == 2 * 7 * CONFIG.num_layers
    for name in expected:
        assert np.any(np.asarray(expected[name], np.float32)), name
        reference.assert_same_bits(found[name], expected[name])


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_that_are_apart(recipe):
    """An array for each kernel, the same bits, and the same merged params."""
    config = dataclasses.replace(CONFIG, hidden_size=512, num_kv_heads=2, mlp_hidden_size=384)
    model = fp8.GPT(config, recipe=RECIPES[recipe], lora=LORA, param_dtype=jnp.bfloat16)
    variables = variables_of(model)
    beside, apart = frozen(model, variables), frozen(model, variables, apart=True)
    for pair, pairs in _joint_and_apart(beside["fp8_frozen"], apart["fp8_frozen"]):
        joined = np.concatenate([part.columnwise.dequantize() for part in pairs])
        np.testing.assert_array_equal(joined, pair.columnwise.dequantize())
    gradient = jax.jit(fp8.value_and_grad(lambda v: fp8.next_token_loss(model)(v, TOKENS)))
    wanted, found = gradient(beside)[:2], gradient(apart)[:2]
    assert all(np.any(np.asarray(leaf, np.float32)) for leaf in adapters(found[1]).values())
    jax.tree.map(reference.assert_same_bits, found, wanted)
    like = jax.eval_shape(model.clone(lora=None, recipe=None).init, jax.random.key(0), INPUTS)["params"]
    merged = [fp8.merge_adapters(own, LORA, like) for own in (apart, beside)]
    jax.tree.map(reference.assert_same_bits, *merged)
    tokens = [fp8.generate(model, own, INPUTS[:2, :8], max_new_tokens=4) for own in (apart, beside)]
    np.testing.assert_array_equal(*tokens)


def _joint_and_apart(beside, apart):
    """Each frozen weight of several kernels, and the list of the same kernels that are apart."""
    for layer in beside.values():
        for gemm, names in (("attention", ("query", "key", "value")), ("mlp", ("gate", "up"))):
            joint = layer[gemm]["+".join(names)]["kernel"]
            own = [apart[key][gemm][name]["kernel"] for name in names for key in apart if beside[key] is layer]
            yield joint, own


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_training_changes_the_adapters_alone(recipe, microbatches, tmp_path):
    """Frozen weights and frozen params keep their bits; a checkpoint resumes to the same bits."""
    model, tx = model_of(RECIPES[recipe]), fp8.freeze(fp8.fused_adamw(1e-2), trained="lora_")
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, model.recipe, microbatches)

    def init(key, tokens):
        return fp8.freeze_kernels(model.init(key, tokens), model.recipe, forward=lambda v: model.apply(v, tokens))

    state = step.init_state(init, jax.random.key(0), INPUTS)
    before = jax.tree.map(np.asarray, state)
    losses = []
    for _ in range(3):
        state, metrics = step(state, TOKENS)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0] - 0.01
    jax.tree.map(reference.assert_same_bits, state.collections, before.collections)
    for (path, new), (_, old) in zip(
        *map(jax.tree_util.tree_leaves_with_path, (state.params, before.params)), strict=True
    ):
        if "lora_" in path[-1].key:
            assert np.any(np.asarray(new != old)), path
        else:
            reference.assert_same_bits(new, old)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: state))
    state, metrics = step(state, TOKENS)
    resumed, again = step(restored, TOKENS)
    reference.assert_same_bits(again["loss"], metrics["loss"])
    jax.tree.map(reference.assert_same_bits, resumed, state)


def test_bytes():
    """A frozen kernel has one byte an element and a scale; the optimizer stores moments of adapters alone."""
    model = model_of(RECIPES["delayed"])
    variables = variables_of(model)
    own = frozen(model, variables)
    kernels = [
        leaf for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"]) if path[-1].key == "kernel"
    ]
    gemms = 4 * CONFIG.num_layers
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(own["fp8_frozen"])) == sum(k.size for k in kernels) + 8 * gemms
    left = jax.tree_util.tree_leaves_with_path(own["params"])
    assert not any(path[-1].key == "kernel" for path, _ in left)
    opt_state = fp8.freeze(fp8.fused_adamw(1e-2), trained="lora_").init(own["params"])
    trained = sum(leaf.size for leaf in adapters(own["params"]).values())
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(opt_state)) == 4 + 12 * trained  # two moments and a master


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_merged_model_is_base_plus_adapters(recipe):
    """In float32 the logits of the merged params are those of dequantized kernels with adapters beside them."""
    model = model_of(RECIPES[recipe])
    own = frozen(model, variables_of(model))
    exact = fp8.GPT(CONFIG, recipe=None, dtype=jnp.float32)
    like = jax.eval_shape(exact.init, jax.random.key(0), INPUTS)["params"]
    merged = fp8.merge_adapters(own, LORA, like)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), merged) == jax.tree.map(lambda x: (x.shape, x.dtype), like)
    none = map_with_names(lambda names, p: 0 * p if names[-1] == LORA_B else p, own["params"])
    base = fp8.merge_adapters({**own, "params": none}, LORA, like)
    beside = exact.clone(lora=LORA)
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(exact.apply)({"params": merged}, INPUTS)
        wanted = jax.jit(beside.apply)({"params": _joined(base, own["params"])}, INPUTS)
        without = jax.jit(exact.apply)({"params": base}, INPUTS)
    assert np.abs(without - wanted).max() > 0.01 * np.std(wanted)
    np.testing.assert_allclose(logits, wanted, atol=1e-5 * np.std(wanted))


def test_generate_reads_frozen_kernels():
    """The tokens of the same model whose kernels are params."""
    model = model_of(RECIPES["current"])
    variables = variables_of(model)
    tokens = fp8.generate(model, variables, INPUTS[:2, :8], max_new_tokens=6)
    np.testing.assert_array_equal(
        fp8.generate(model, frozen(model, variables), INPUTS[:2, :8], max_new_tokens=6), tokens
    )
    other = {**variables, "params": map_with_names(lambda n, p: -p if n[-1] == "kernel" else p, variables["params"])}
    changed = fp8.generate(model, frozen(model, other), INPUTS[:2, :8], max_new_tokens=6)
    assert np.any(changed != tokens)


@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize("apart", [False, True])
def test_without_a_recipe_layers_multiply_by_frozen_weights_in_their_dtype(recipe, apart):
    """As by the dequantized kernels as params: the numbers, the gradients of adapters, and the generated tokens."""
    whole_tiles = {"hidden_size": 128, "mlp_hidden_size": 256, "num_heads": 2, "num_kv_heads": 1, "head_dim": 128}
    own_config = dataclasses.replace(CONFIG, **whole_tiles)
    model = fp8.GPT(own_config, recipe=RECIPES[recipe], lora=LORA, dtype=jnp.float32)
    variables = variables_of(model)
    stored = {name: tree for name, tree in frozen(model, variables, apart=apart).items() if name != "fp8"}
    plain = model.clone(recipe=None)
    none = map_with_names(lambda names, p: 0 * p if names[-1] == LORA_B else p, stored["params"])
    like = jax.eval_shape(plain.clone(lora=None).init, jax.random.key(0), INPUTS)["params"]
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), like)
    thawed = _joined(fp8.merge_adapters({**stored, "params": none}, LORA, like), stored["params"])

    def loss(params, others):
        return fp8.next_token_loss(plain)({"params": params, **others}, TOKENS)

    with jax.default_matmul_precision("highest"):
        found, grads = jax.jit(jax.value_and_grad(loss))(stored["params"], {"fp8_frozen": stored["fp8_frozen"]})
        wanted, wanted_grads = jax.jit(jax.value_and_grad(loss))(thawed, {})
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    wanted_adapters = adapters(wanted_grads)
    for name, gradient in adapters(grads).items():
        np.testing.assert_allclose(gradient, wanted_adapters[name], rtol=1e-3, atol=1e-4 * np.abs(gradient).max())
        assert np.abs(gradient).max() > 0
    tokens = fp8.generate(plain, stored, INPUTS[:2, :8], max_new_tokens=6)
    np.testing.assert_array_equal(fp8.generate(plain, {"params": thawed}, INPUTS[:2, :8], max_new_tokens=6), tokens)
    scales = jax.tree.map(lambda x: -x if x.dtype == jnp.float32 else x, stored["fp8_frozen"])
    negative = {**stored, "fp8_frozen": scales}
    assert np.any(fp8.generate(plain, negative, INPUTS[:2, :8], max_new_tokens=6) != tokens)  # negative control


def test_loaded_params_take_the_place_of_random_ones():
    model = model_of(RECIPES["delayed"])
    variables = variables_of(model)
    loaded = jax.tree.map(np.asarray, jax.jit(model.clone(lora=None).init)(jax.random.key(7), INPUTS)["params"])
    own = frozen(model, variables, params=loaded)
    np.testing.assert_array_equal(own["params"]["embedding"], loaded["embedding"])
    found = own["fp8_frozen"]["layer_0"]["attention"]["out"]["kernel"].columnwise.dequantize().T
    wanted = np.asarray(loaded["layer_0"]["attention"]["out"]["kernel"], np.float32)
    assert np.linalg.norm(found - wanted) < 0.04 * np.linalg.norm(wanted)
    reference.assert_same_bits(
        own["params"]["layer_0"]["attention"]["out"]["lora_a"],
        variables["params"]["layer_0"]["attention"]["out"]["lora_a"],
    )
    without_recipe = fp8.freeze_kernels(variables, None, loaded)
    np.testing.assert_array_equal(
        without_recipe["params"]["layer_1"]["mlp"]["up"]["kernel"], loaded["layer_1"]["mlp"]["up"]["kernel"]
    )


def test_what_is_refused():
    model = model_of(RECIPES["delayed"])
    variables = variables_of(model)
    own = frozen(model, variables)
    with pytest.raises(ValueError, match="got nonsense, which it does not have"):
        frozen(model, variables, params={"nonsense": np.zeros(3)})
    with pytest.raises(ValueError, match="for embedding"):
        frozen(model, variables, params={"embedding": np.zeros((3, 4))})
    with pytest.raises(ValueError, match="apart must not share a tile of 128 columns"):
        by_tile = model.clone(recipe=RECIPES["block"])
        frozen(by_tile, variables_of(by_tile), apart=True)
    wrong = {**own, "fp8_frozen": jax.tree.map(lambda x: x, own["fp8_frozen"])}
    wrong["fp8_frozen"]["layer_0"]["mlp"]["down"] = own["fp8_frozen"]["layer_0"]["attention"]["out"]
    with pytest.raises(ValueError, match="mlp/down: a frozen weight must be float8_e4m3fn of shape"):
        model.apply(wrong, INPUTS)
    with pytest.raises(ValueError, match="layer_0/attention/key/kernel of shape"):
        like = jax.eval_shape(model.clone(lora=None).init, jax.random.key(0), INPUTS)["params"]
        fp8.merge_adapters({"params": own["params"]}, LORA, like)


def _joined(base, params):
    """`base` with the adapters of `params`."""
    return {
        name: _joined(base.get(name, {}), child) if isinstance(child, dict) else base.get(name, child)
        for name, child in {**base, **params}.items()
    }
