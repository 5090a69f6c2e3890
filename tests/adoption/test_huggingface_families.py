"""The families of tests/huggingface_families.py compute what the published equations say, come back bit for bit, and
train in FP8.
"""

import functools
import json

import huggingface as oracle
import huggingface_families as families
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.core.paths import names_of
from jax_fp8.models.huggingface.config_json import family_of
from jax_fp8.models.huggingface.layouts import entries_of

safetensors_numpy = pytest.importorskip("safetensors.numpy")

CLOSE = 2e-5  # of logits in float32, in their standard deviations
PROMPT, NEW = 20, 64
TOKENS = np.random.default_rng(1).integers(0, families.VOCAB, 48)
RECIPE = fp8.DelayedScaling(amax_history_len=4)
SLOW = {"llama, linear", "llama, biases of attention", "olmo2", "phi3, long", "mistral", "qwen2, windows"}
SOME = [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in families.CASES]


@functools.cache
def tensors_of(case, dtype="float32"):
    return families.random_tensors(families.CASES[case], dtype)


@functools.cache
def logits_of(case):
    return families.logits_of(families.CASES[case], tensors_of(case), TOKENS)


@pytest.fixture
def load(tmp_path):
    return lambda case, **changes: fp8.load_huggingface(
        oracle.write_folder(tmp_path / "theirs", families.CASES[case] | changes, tensors_of(case))
    )


def our_logits(config, params):
    model = fp8.GPT(config, recipe=None, dtype=jnp.float32)
    return np.asarray(jax.jit(model.apply)({"params": params}, TOKENS[None].astype(np.int32))[0])


def distance(got, wanted):
    return np.abs(got - wanted).max() / wanted.std()


@pytest.mark.parametrize("case", families.CASES)
def test_logits_are_those_of_the_equations(case, load):
    assert distance(our_logits(*load(case)), logits_of(case)) < CLOSE


# What the equations give with one field changed: a model that ignored the field would compute this.
WRONG = [
    ("llama, linear", {"rope_scaling": None}),
    ("llama, linear", {"hidden_act": "silu"}),
    ("llama, yarn", {"rope_scaling": families.YARN | {"attention_factor": 1.0}}),
    ("llama, yarn", {"rope_scaling": families.YARN | {"factor": 1.0}}),
    ("llama, yarn", {"rope_scaling": families.YARN | {"original_max_position_embeddings": 512}}),
    ("mistral", {"sliding_window": 11}),
    ("qwen2, windows", {"layer_types": [families.FULL] * 4}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 16}),
    ("gemma2", {"layer_types": families.MIXED}),
    ("gemma3", {"rope_local_base_freq": 1e6}),
    ("gemma3", {"rope_scaling": None}),
    ("olmo3", {"sliding_window": 20}),
    ("phi3", {"partial_rotary_factor": 1.0, "rope_scaling": None}),
    ("phi3", {"original_max_position_embeddings": 16}),
    ("smollm3", {"no_rope_layers": [1] * 4}),
    *(("granite", {name: 1.0}) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")),
    ("granite", {"attention_multiplier": 12**-0.5}),
]


@pytest.mark.parametrize(("case", "changes"), WRONG, ids=str)
def test_what_is_wrong_would_be_noticed(case, changes):
    """Negative controls of the test above."""
    found = families.logits_of(families.CASES[case] | changes, tensors_of(case), TOKENS)
    assert distance(found, logits_of(case)) > 10 * CLOSE


@pytest.mark.parametrize("case", SOME)
def test_a_prompt_goes_on_as_the_equations_say(case, load):
    """By the most likely token, 64 times."""
    config, params = load(case)
    model, steps = fp8.GPT(config, recipe=None, dtype=jnp.float32), NEW
    if case == "phi3":  # the cache keeps what it has when a text becomes long; transformers computes it again
        steps = 40
    written = np.asarray(fp8.generate(model, {"params": params}, TOKENS[None, :PROMPT], max_new_tokens=steps))[0]
    text = list(TOKENS[:PROMPT])
    for _ in range(steps):
        text.append(int(families.logits_of(families.CASES[case], tensors_of(case), text)[-1].argmax()))
    np.testing.assert_array_equal(written, text[PROMPT:])
    assert len(set(text[PROMPT:])) > 4


@pytest.mark.parametrize("case", families.CASES)
def test_every_tensor_comes_back_bit_for_bit(case, load, tmp_path):
    config, params = load(case)
    own = families.CASES[case]["model_type"]
    fp8.save_huggingface(tmp_path / "ours", config, params, model_type=own)
    found = safetensors_numpy.load_file(tmp_path / "ours/model.safetensors")
    assert set(found) == set(tensors_of(case))
    for name, array in tensors_of(case).items():
        assert found[name].tobytes() == array.tobytes() and found[name].shape == array.shape, name
    described = json.loads((tmp_path / "ours/config.json").read_text())
    shared = (set(described) & set(families.CASES[case])) - {"rope_parameters", "rope_scaling"}
    assert len(shared) > 6
    assert {name: described[name] for name in shared} == {name: families.CASES[case][name] for name in shared}
    again = fp8.load_huggingface(tmp_path / "ours")
    assert again[0] == config
    jax.tree.map(np.testing.assert_array_equal, again[1], params)


def test_without_a_family_the_first_that_fits_is_written(load, tmp_path):
    """Mistral without its window is a Llama; in the layout of Phi-3 it has other tensors; with it, it is a Mistral."""
    config, params = load("mistral", sliding_window=None)
    for wanted, model_type in (("llama", None), ("phi3", "phi3"), ("mistral", "mistral")):
        fp8.save_huggingface(tmp_path / wanted, config, params, model_type=model_type)
        assert json.loads((tmp_path / wanted / "config.json").read_text())["model_type"] == wanted
        again = fp8.load_huggingface(tmp_path / wanted)
        jax.tree.map(np.testing.assert_array_equal, again[1], params)
        assert distance(our_logits(*again), our_logits(config, params)) == 0
    windowed, _ = load("mistral")
    assert family_of(windowed) == "mistral"
    with pytest.raises(ValueError, match=r"must be like one of llama, in every field .*sliding_window=10"):
        fp8.save_huggingface(tmp_path / "other", windowed, params, model_type="llama")
    with pytest.raises(ValueError, match=r"model_type must be one of llama, .*, got 'bloom'; leave it out"):
        fp8.save_huggingface(tmp_path / "other", windowed, params, model_type="bloom")


TRAINED = ["gemma2", "gemma3", "olmo3", "phi3", "smollm3", "granite"]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case in ("gemma2", "olmo3", "phi3", "smollm3") else ())
        for case in TRAINED
    ],
)
def test_training_goes_on_from_them(case, tmp_path):
    """In FP8, from the loss that the equations give. In float32 the gradient is the slope of that loss in NumPy, and in
    FP8 it is near that; a gradient of zero would be at distance 1.
    """
    described = families.CASES[case]
    tensors = families.random_tensors(described, deviation=0.06)  # with larger ones, FP8 is far from float32
    config, params = fp8.load_huggingface(oracle.write_folder(tmp_path, described, tensors))
    rows = np.stack([TOKENS[:33]] * 4).astype(np.int32)

    def gradients_of(recipe, dtype):
        loss_fn = fp8.next_token_loss(fp8.GPT(config, recipe=recipe, dtype=dtype))
        loss, gradients, _ = jax.jit(fp8.value_and_grad(loss_fn))({"params": params}, rows)
        return float(loss), gradients

    def loss_of(tensors):
        logits, labels = families.logits_of(described, tensors, TOKENS[:32]), TOKENS[1:33]
        return np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(32), labels])

    (loss, gradients), (exact_loss, exact) = (
        gradients_of(*how) for how in ((fp8.CurrentScaling(), jnp.bfloat16), (None, jnp.float32))
    )
    wanted = loss_of(tensors)
    assert exact_loss == pytest.approx(wanted, rel=1e-5) and loss == pytest.approx(wanted, rel=0.05)
    entries = entries_of(config, described["model_type"])
    flat = {names_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(exact)}
    slopes = {entry.name: entry.tensor_of([flat[path] for path in entry.paths]) for entry in entries}
    for kind in ("embed_tokens", "self_attn", "norm", "mlp."):  # along the gradient of some tensors
        step = {name: 1e-4 * slope / np.linalg.norm(slope) for name, slope in slopes.items() if kind in name}
        ahead, behind = (
            loss_of(tensors | {name: np.float64(tensors[name]) + sign * move for name, move in step.items()})
            for sign in (1, -1)
        )
        expected = 1e-4 * sum(np.linalg.norm(slopes[name]) for name in step)
        assert (ahead - behind) / 2 == pytest.approx(expected, rel=1e-3), kind
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        precise = flat[names_of(path)]
        assert np.linalg.norm(precise) > 0, path
        assert np.linalg.norm(gradient - precise) < 0.5 * np.linalg.norm(precise), path
    model = fp8.GPT(config, recipe=RECIPE)
    train = fp8.make_train_step(fp8.next_token_loss(model), fp8.fused_adamw(1e-3), RECIPE)
    state = train.init_state(lambda *args: {**model.init(*args), "params": params}, jax.random.key(0), rows[:, :-1])
    losses = []
    for _ in range(4):
        state, metrics = train(state, rows)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(wanted, rel=0.05) and losses[-1] < losses[0] - 0.05
