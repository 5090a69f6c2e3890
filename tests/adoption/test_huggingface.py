"""What models of Hugging Face compute here is what the published equations say: logits, texts, and the loss that
training goes on from.
"""

import functools

import huggingface as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import make_mesh

import jax_fp8 as fp8

pytest.importorskip("safetensors.numpy")

CLOSE = 2e-5  # of logits in float32, in their standard deviations
PROMPT, NEW = 20, 64
TOKENS = np.random.default_rng(1).integers(0, oracle.VOCAB, 48)


@functools.cache
def tensors_of(case, dtype="float32"):
    return oracle.random_tensors(oracle.CASES[case], dtype)


@functools.cache
def logits_of(case):
    return oracle.logits_of(oracle.CASES[case], tensors_of(case), TOKENS)


@pytest.fixture
def folder_of(tmp_path):
    return lambda case, dtype="float32": oracle.write_folder(tmp_path, oracle.CASES[case], tensors_of(case, dtype))


def our_logits(config, params):
    model = fp8.GPT(config, recipe=None, dtype=jnp.float32)
    return np.asarray(jax.jit(model.apply)({"params": params}, TOKENS[None].astype(np.int32))[0])


def distance(got, wanted):
    return np.abs(got - wanted).max() / wanted.std()


# Of a second jax only one: how a checkpoint is read does not depend on it.
def on_versions(case, slow=()):
    return pytest.param(
        case, marks=pytest.mark.slow if case in slow else pytest.mark.versions if case == "qwen3" else ()
    )


@pytest.mark.parametrize("case", [on_versions(case) for case in oracle.CASES])
def test_logits_are_those_of_the_equations(case, folder_of):
    assert distance(our_logits(*fp8.load_huggingface(folder_of(case))), logits_of(case)) < CLOSE


RECIPE = fp8.DelayedScaling(amax_history_len=4)


@pytest.mark.parametrize(
    ("case", "recipe"), [("gpt2", None), pytest.param("gpt2", RECIPE, marks=pytest.mark.slow), ("llama", None)], ids=str
)
def test_params_as_they_were_read_may_be_constants_of_a_program(case, recipe, folder_of):
    """They are NumPy arrays, which a function under `jax.jit` closes over: for logits, gradients and new tokens."""
    config, params = fp8.load_huggingface(folder_of(case))
    assert all(isinstance(param, np.ndarray) for param in jax.tree.leaves(params))
    model, tokens = fp8.GPT(config, recipe=recipe), jnp.asarray(TOKENS[None, :33], jnp.int32)
    state = {"fp8": model.init(jax.random.key(0), tokens[:, :-1])["fp8"]} if recipe else {}
    gradient = fp8.value_and_grad(fp8.next_token_loss(model))

    def program(variables, tokens):
        text = fp8.generate(model, variables, tokens[:, :8], max_new_tokens=4)
        return model.apply(variables, tokens), gradient(variables, tokens), text

    variables = {"params": params, **state}
    closed_over = jax.jit(lambda tokens: program(variables, tokens))(tokens)
    passed = jax.jit(program)(jax.device_put(variables), tokens)
    for got, wanted in zip(jax.tree.leaves(closed_over), jax.tree.leaves(passed), strict=True):
        got, wanted = (np.asarray(array, np.float32) for array in (got, wanted))
        assert np.linalg.norm(got - wanted) <= 1e-2 * np.linalg.norm(wanted)


def interleaved(x):
    return np.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)


def transposed(case, name):
    tensors = dict(tensors_of(case))
    tensors[name] = tensors[name].T
    return tensors


def swapped(case, name):
    """With the kernels of two experts in each other's place."""
    tensors = dict(tensors_of(case))
    one, other = (f"model.layers.0.{name.format(expert)}.weight" for expert in (0, 1))
    return tensors | {one: tensors[other], other: tensors[one]}


def without(case, name):
    """With zeros in the place of a tensor."""
    tensors = tensors_of(case)
    return tensors | {name: np.zeros_like(tensors[name])}


# What the equations give with one thing wrong: the case, fields of the config, tensors, how pairs are turned.
WRONG = {
    "pairs (2i, 2i + 1)": ("llama", {}, None, interleaved),
    "a transposed kernel": ("llama", {}, transposed("llama", "model.layers.0.self_attn.q_proj.weight"), None),
    "a transposed kernel of GPT-2": ("gpt2", {}, transposed("gpt2", "transformer.h.1.attn.c_proj.weight"), None),
    "no scaling": ("llama 3.1", {"rope_scaling": None}, None, None),
    "another scaling": ("llama 3.1", {"rope_scaling": oracle.SCALING | {"low_freq_factor": 0.5}}, None, None),
    "another base": ("qwen2", {"rope_theta": 1e4}, None, None),
    "another epsilon": ("llama", {"rms_norm_eps": 1e-3}, None, None),
    "one expert a token": ("mixtral", {"num_experts_per_tok": 1}, None, None),
    "experts in another order": ("mixtral", {}, swapped("mixtral", "block_sparse_moe.experts.{}.w1"), None),
    "weights that add up to 1": ("qwen3 with experts", {"norm_topk_prob": True}, None, None),
    "no scale of the experts": ("glm", {"routed_scaling_factor": 1.0}, None, None),
    "one group of experts more": ("glm", {"topk_group": 3}, None, None),
    "no biases of routers": ("glm", {}, without("glm", "model.layers.1.mlp.gate.e_score_correction_bias"), None),
    "all features rotate": ("glm", {"partial_rotary_factor": 1.0}, None, None),
    "a shared expert of weight 1 / 2": (
        "qwen2 with experts",
        {},
        without("qwen2 with experts", "model.layers.1.mlp.shared_expert_gate.weight"),
        None,
    ),
    "another epsilon of GPT-2": ("gpt2", {"layer_norm_epsilon": 1e-3}, None, None),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_would_be_noticed(what):
    """Negative controls of the test above: the equations themselves, with one thing changed."""
    case, fields, tensors, rotate = WRONG[what]
    described = oracle.CASES[case] | fields
    found = oracle.logits_of(described, tensors or tensors_of(case), TOKENS, rotate or oracle.rotate_half)
    assert distance(found, logits_of(case)) > 10 * CLOSE


SLOW = {"llama", "llama 3.2", "llama with biases"}


@pytest.mark.parametrize("case", [on_versions(case, SLOW) for case in oracle.CASES])
def test_a_prompt_goes_on_as_the_equations_say(case, folder_of):
    """By the most likely token, 64 times."""
    config, params = fp8.load_huggingface(folder_of(case))
    model = fp8.GPT(config, recipe=None, dtype=jnp.float32)
    written = np.asarray(fp8.generate(model, {"params": params}, TOKENS[None, :PROMPT], max_new_tokens=NEW))[0]
    text = list(TOKENS[:PROMPT])
    for _ in range(NEW):
        text.append(int(oracle.logits_of(oracle.CASES[case], tensors_of(case), text)[-1].argmax()))
    np.testing.assert_array_equal(written, text[PROMPT:])
    assert len(set(text[PROMPT:])) > 4


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(None, id="one device"),
        pytest.param({"fsdp": 2, "tensor": 2}, id="a mesh", marks=pytest.mark.versions),
    ],
)
def test_training_goes_on_from_them(axes, folder_of):
    """In FP8, from the loss that the equations give."""
    config, params = fp8.load_huggingface(folder_of("qwen3", "bfloat16"), dtype=jnp.float32)
    model, tx, batch = (
        fp8.GPT(config, recipe=fp8.DelayedScaling(amax_history_len=4)),
        fp8.fused_adamw(1e-3),
        TOKENS[:33],
    )
    rows = np.stack([batch] * 4).astype(np.int32)
    mesh = None if axes is None else make_mesh(**axes)
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, model.recipe, parallel=mesh)
    state = step.init_state(lambda *args: {**model.init(*args), "params": params}, jax.random.key(0), rows[:, :-1])
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    logits = oracle.logits_of(oracle.CASES["qwen3"], tensors_of("qwen3", "bfloat16"), batch[:-1])
    wanted = np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(32), batch[1:]])
    losses = []
    for _ in range(4):
        state, metrics = step(state, rows)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(wanted, rel=0.02)
    assert losses[-1] < losses[0] - 0.05
