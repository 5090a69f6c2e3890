"""Adapters in the layout of PEFT: the models that they make are those of the file's own numbers, merged by NumPy."""

import json

import huggingface as oracle
import huggingface_families as families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8

safetensors_numpy = pytest.importorskip("safetensors.numpy")

RANK, ALPHA = 4, 6
TOKENS = np.random.default_rng(1).integers(0, oracle.VOCAB, (1, 16))
CLOSE = 5e-4  # of logits in float32, in their standard deviations: CPUs add in other orders
LLAMA, GPT2 = oracle.CASES["llama"], oracle.CASES["gpt2"]
PHI3 = families.CASES["phi3"]
SOME = {"q_proj", "down_proj"}
FIELDS = {
    "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"], "bias": "none",
    "fan_in_fan_out": False, "use_dora": False, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {},
    "modules_to_save": None, "base_model_name_or_path": "a/model", "task_type": "CAUSAL_LM", "megatron_core": None,
}  # fmt: skip


def base_tensors(described):
    return (families if described is PHI3 else oracle).random_tensors(described)


def linear_layers(described, endings=None):
    """The names of linear layers and the shapes (features, in) that they have in PyTorch."""
    found = {}
    for name, tensor in base_tensors(described).items():
        module = name.removesuffix(".weight")
        if (".layers." not in name and ".h." not in name) or tensor.ndim != 2:
            continue
        if endings is None or module.split(".")[-1] in endings:
            found[module] = tensor.shape[::-1] if described is GPT2 else tensor.shape
    return found


def adapter_tensors(described, endings=None, rank=RANK):
    random, found = np.random.default_rng(2), {}
    for module, (features, size) in linear_layers(described, endings).items():
        found[f"base_model.model.{module}.lora_A.weight"] = random.normal(0, 0.3, (rank, size)).astype(np.float32)
        found[f"base_model.model.{module}.lora_B.weight"] = random.normal(0, 0.3, (features, rank)).astype(np.float32)
    return found


def write_adapters(folder, tensors, **changes):
    folder.mkdir(exist_ok=True)
    safetensors_numpy.save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(FIELDS | changes))
    return folder


def merged_tensors(described, adapters, scaling):
    """The base's tensors, plus `scaling · B · A`; GPT-2 stores the transpose."""
    tensors = dict(base_tensors(described))
    for module in linear_layers(described):
        name = f"base_model.model.{module}.lora_{{}}.weight"
        if name.format("A") in adapters:
            change = scaling * adapters[name.format("B")].astype(float) @ adapters[name.format("A")].astype(float)
            whole = tensors[f"{module}.weight"] + (change.T if described is GPT2 else change)
            tensors[f"{module}.weight"] = whole.astype(np.float32)
    return tensors


def logits(config, params, lora=None):
    model = fp8.GPT(config, recipe=None, dtype=jnp.float32, lora=lora)
    return np.asarray(jax.jit(model.apply)({"params": params}, TOKENS))


def distance(found, wanted):
    return np.abs(found - wanted).max() / wanted.std()


@pytest.fixture
def base(tmp_path):
    return lambda described, tensors=None: fp8.load_huggingface(
        oracle.write_folder(tmp_path / f"base{tensors is None}", described, tensors or base_tensors(described))
    )


@pytest.mark.parametrize(
    ("described", "endings", "layers"),
    [
        (LLAMA, None, None),
        (LLAMA, SOME, ("query", "down")),
        (PHI3, {"qkv_proj", "down_proj"}, ("query", "key", "value", "down")),
        (GPT2, {"c_attn", "c_fc"}, ("query", "key", "value", "up")),
    ],
    ids=["all", "some", "joint", "gpt2"],
)
@pytest.mark.parametrize("is_stabilized", [False, True])
def test_loaded_adapters_compute_the_sum(base, tmp_path, described, endings, layers, is_stabilized):
    adapters = adapter_tensors(described, endings)
    folder = write_adapters(tmp_path / "adapters", adapters, use_rslora=is_stabilized)
    scaling = ALPHA / (RANK**0.5 if is_stabilized else RANK)
    config, params = base(described)
    lora, adapted = fp8.load_adapters(folder, config, params)
    assert lora == fp8.Lora(rank=RANK, alpha=scaling * RANK, targets=layers)
    wanted = logits(*base(described, merged_tensors(described, adapters, scaling)))
    assert distance(logits(config, adapted, lora), wanted) < CLOSE
    # The controls: without adapters, and with their factor left out.
    assert distance(logits(config, params), wanted) > 0.1
    assert distance(logits(config, adapted, fp8.Lora(rank=RANK, targets=layers)), wanted) > 0.01
    assert "lora_a" not in params["layer_0"]["attention"]["query"]  # the caller's params are as they were


def random_adapters(config, lora, seed=3):
    model = fp8.GPT(config, recipe=None, lora=lora)
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda param: jnp.asarray(random.normal(0, 0.3, param.shape), jnp.bfloat16), shapes)


def adapters_of(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves if "lora_" in str(path[-1])}


@pytest.mark.parametrize("described", [LLAMA, PHI3, GPT2], ids=["llama", "phi3", "gpt2"])
@pytest.mark.parametrize("targets", [None, ("query", "value", "down")], ids=["all", "some"])
def test_every_number_comes_back(base, tmp_path, described, targets):
    config, _ = base(described)
    lora = fp8.Lora(rank=RANK, alpha=ALPHA, targets=targets)
    params = random_adapters(config, lora)
    fp8.save_adapters(tmp_path / "out", config, params, lora, base=str(tmp_path / "baseTrue"))
    again, loaded = fp8.load_adapters(tmp_path / "out", config)
    wanted, found = adapters_of(params), adapters_of(loaded)
    assert again == lora
    assert sorted(found) == sorted(wanted) and len(jax.tree.leaves(loaded)) == len(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(("rank", "alpha"), [(3, 0.1), (7, 0.7), (11, 1.3)])
def test_a_factor_that_is_rounded_is_one_factor(base, tmp_path, rank, alpha):
    """`3 alpha / 3 rank` of a joint matrix and `alpha / rank` of another may differ in their last bit."""
    config, _ = base(PHI3)
    lora = fp8.Lora(rank=rank, alpha=alpha)
    fp8.save_adapters(tmp_path / "out", config, random_adapters(config, lora), lora, model_type="phi3")
    described = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert described["lora_alpha"] == alpha
    assert fp8.load_adapters(tmp_path / "out", config)[0].alpha == pytest.approx(alpha, rel=1e-12)


def test_files(base, tmp_path):
    """PEFT's names, shapes and fields; a matrix for several layers has an adapter of their ranks together."""
    config, _ = base(PHI3)
    lora = fp8.Lora(rank=2, alpha=3, targets=("query", "value", "down"))
    params = random_adapters(config, lora)
    fp8.save_adapters(tmp_path / "out", config, params, lora, model_type="phi3", base="a/model", dtype=jnp.float32)
    described = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert described["target_modules"] == ["mlp.down_proj", "self_attn.qkv_proj"]
    assert (described["r"], described["lora_alpha"], described["base_model_name_or_path"]) == (2, 3, "a/model")
    assert described["rank_pattern"] == {"self_attn.qkv_proj": 6}
    assert described["alpha_pattern"] == {"self_attn.qkv_proj": 9}
    tensors = safetensors_numpy.load_file(tmp_path / "out" / "adapter_model.safetensors")
    first, second = (tensors[f"base_model.model.model.layers.0.self_attn.qkv_proj.lora_{part}.weight"] for part in "AB")
    attention = params["layer_0"]["attention"]
    wanted = {
        name: jnp.float32(attention[name]["lora_a"]) @ jnp.float32(attention[name]["lora_b"])
        for name in lora.targets[:2]
    }
    got = np.split((second @ first).T, np.cumsum([attention[n]["kernel"].shape[1] for n in ("query", "key")]), axis=1)
    np.testing.assert_allclose(got[0], wanted["query"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[1], np.zeros_like(got[1]))
    np.testing.assert_allclose(got[2], wanted["value"], rtol=1e-5, atol=1e-6)
    assert first.dtype == np.float32 and len(tensors) == 2 * 2 * config.num_layers


def test_on_a_frozen_base(base, tmp_path):
    """Loaded adapters go on where they were: `freeze_kernels` takes them with the base."""
    config, params = base(PHI3, families.random_tensors(PHI3, deviation=0.06))  # with larger ones, FP8 is far away
    adapters = {name: tensor / 3 for name, tensor in adapter_tensors(PHI3).items()}
    lora, adapted = fp8.load_adapters(write_adapters(tmp_path / "a", adapters), config, params)
    recipe = fp8.DelayedScaling()
    model = fp8.GPT(config, recipe=recipe, lora=lora)
    variables = fp8.freeze_kernels(model.init(jax.random.key(0), TOKENS), recipe, adapted)
    wanted, found = adapters_of(adapted), adapters_of(variables["params"])
    assert sorted(found) == sorted(wanted)
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    exact = logits(config, adapted, lora)
    assert distance(np.asarray(model.apply(variables, TOKENS), np.float32), exact) < 0.5
    assert distance(logits(config, params), exact) > 1  # without adapters


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type in .* must be 'LORA', got"),
        ({"use_dora": True}, "use_dora in .* must be empty, got [tT]rue"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save in .* must be empty"),
        ({"bias": "all"}, "bias in .* must be 'none'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights in .* must be True or False"),
        ({"a_new_kind": 3}, "a_new_kind in .* must be empty"),
        ({"r": 8}, "r in .* must be the rank of model.layers.0.self_attn.q_proj, 4, got 8"),
        ({"r": "4"}, "r in .* must be"),
        ({"lora_alpha": -1}, "lora_alpha in .* must be a finite number that is positive, got -1"),
        ({"use_rslora": "yes"}, "use_rslora in .* must be true or false"),
        ({"alpha_pattern": {"q_proj": 9}}, "must have one rank and one alpha / rank"),
        ({"rank_pattern": {"^q": 9}}, "rank_pattern in .* must be an object with names of modules"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fields_that_are_refused(base, tmp_path, change, told):
    folder = write_adapters(tmp_path / "a", adapter_tensors(LLAMA), **change)
    with pytest.raises(ValueError, match=told):
        fp8.load_adapters(folder, base(LLAMA)[0])


def renamed(tensors, old, new):
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def of_other_shape(tensors):
    return {name: tensor[:, :-1].copy() if "lora_A" in name else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda tensors: renamed(tensors, "q_proj", "other"),
            "must have adapters of linear layers of this model alone",
        ),
        (lambda tensors: {}, "linear layers of this model alone, got none"),
        (of_other_shape, r"must be a matrix \[rank, 48\] of float32"),
        (lambda tensors: {name: tensor for name, tensor in tensors.items() if "lora_B" not in name}, "got none; take"),
        (
            lambda tensors: {name: tensor for name, tensor in tensors.items() if "layers.1" not in name},
            "all layers named query must have an adapter in .*, but layer_1/attention/query has none",
        ),
        (
            lambda tensors: {name: tensor[:2] if "lora_A" in name else tensor for name, tensor in tensors.items()},
            "rank",
        ),
    ],
)
def test_tensors_that_are_refused(base, tmp_path, change, told):
    folder = write_adapters(tmp_path / "a", change(adapter_tensors(LLAMA)))
    with pytest.raises(ValueError, match=told):
        fp8.load_adapters(folder, base(LLAMA)[0])


def test_folders_that_are_refused(base, tmp_path):
    config, _ = base(LLAMA)
    with pytest.raises(ValueError, match=r"adapter_config.json must be there"):
        fp8.load_adapters(tmp_path / "none", config)
    (write_adapters(tmp_path / "a", adapter_tensors(LLAMA)) / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"must have adapter_model.safetensors, got no such file"):
        fp8.load_adapters(tmp_path / "a", config)
    with pytest.raises(ValueError, match="config must be a GPTConfig, got None"):
        fp8.load_adapters(tmp_path / "a", None)


def test_what_save_refuses(base, tmp_path):
    config, params = base(LLAMA)
    lora = fp8.Lora(rank=2, targets=("query",))
    with pytest.raises(ValueError, match="must have an adapter of rank 2 at layer_0/attention/query"):
        fp8.save_adapters(tmp_path / "out", config, params, lora)
    with pytest.raises(ValueError, match=r"targets among the linear layers of this model, down, gate, .* got \('q',\)"):
        fp8.save_adapters(tmp_path / "out", config, params, fp8.Lora(rank=2, targets=("q",)))
    with pytest.raises(ValueError, match="lora must be the Lora of the model, got"):
        fp8.save_adapters(tmp_path / "out", config, params, None)
    with pytest.raises(ValueError, match="base must be the name or the folder of a model, got"):
        fp8.save_adapters(tmp_path / "out", config, params, lora, base=3)
    assert not (tmp_path / "out").exists()
    fp8.save_adapters(tmp_path / "out", config, random_adapters(config, lora), lora)
    with pytest.raises(ValueError, match=r"must not have adapters yet, got adapter_model\.safetensors"):
        fp8.save_adapters(tmp_path / "out", config, random_adapters(config, lora), lora)
