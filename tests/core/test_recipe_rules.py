"""Recipes by the paths of layers: which rule counts, which recipe a step has, and models whose layers have recipes by
rules: in steps, on a mesh, in generated text.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8 import BlockScaling, CurrentScaling, DelayedScaling
from jax_fp8.core.recipe_rules import RecipeRules, recipe_at, recipe_of_all, step_recipe

pytestmark = pytest.mark.versions

DELAYED, BLOCK = DelayedScaling(), BlockScaling()
CONFIG = fp8.GPTConfig(vocab_size=32, num_layers=1, num_heads=1, hidden_size=16, max_seq_len=8)
RULES = {"layer_0/.*": None, ".*/mlp/.*": BLOCK, "layer_[1-7]/.*": DELAYED}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("layer_0/mlp/up", None),  # the first that matches counts
        ("layer_1/mlp/up", BLOCK),
        ("layer_1/attention/out", DELAYED),
        ("my/layer_1/attention/out", None),  # the whole path must match
        ("layer_8/attention/out", None),
    ],
)
def test_the_first_rule_that_matches_the_whole_path_counts(path, expected):
    assert recipe_at(RULES, tuple(path.split("/"))) == expected


def test_one_recipe_is_that_of_every_layer():
    assert recipe_at(DELAYED, ("any",)) == DELAYED and recipe_at(None, ("any",)) is None


def test_rules_of_a_module_can_be_hashed_and_keep_their_order():
    rules, other = RecipeRules(RULES), RecipeRules(dict(reversed(RULES.items())))
    assert hash(rules) == hash(RecipeRules(RULES)) and rules == RecipeRules(RULES) and rules != other
    assert [*rules] == [*RULES] and rules[".*/mlp/.*"] == BLOCK and repr(rules) == repr(RULES)
    assert isinstance(fp8.GPT(CONFIG, recipe=RULES).recipe, RecipeRules) and hash(fp8.GPT(CONFIG, recipe=RULES))
    assert isinstance(fp8.Dense(16, recipe=RULES).recipe, RecipeRules)


def test_layers_that_share_a_gemm_have_one_recipe():
    assert recipe_of_all(RULES, ("layer_1", "mlp"), ("gate", "up")) == BLOCK
    with pytest.raises(
        ValueError, match=r"layer_1/mlp: kernels that one GEMM multiplies by must have one recipe, got "
    ):
        recipe_of_all({".*gate": None, ".*": DELAYED}, ("layer_1", "mlp"), ("gate", "up"))


def test_a_step_has_the_recipe_with_state():
    assert step_recipe(RULES) == DELAYED
    assert step_recipe({"a": BLOCK, "b": CurrentScaling()}) == BLOCK
    assert step_recipe({"a": None}) is None and step_recipe(BLOCK) == BLOCK


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({}, "at least one expression"),
        ({"layer_(": None}, r"regular expressions of paths as keys, got 'layer_\('"),
        ({3: None}, "regular expressions of paths as keys, got 3"),
        ({"a": "delayed"}, "recipe must be a recipe such as DelayedScaling"),
        ({"a": {"b": None}}, "got a dict with 'a', whose 'a' leads to a dict with 'b'; pass recipes"),
        ({"a": DELAYED, "b": DelayedScaling(margin=1)}, "one recipe with state, .*margin=0.* and .*margin=1"),
        ("delayed", "recipe must be DelayedScaling"),
    ],
)
def test_what_is_no_rule_is_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        step_recipe(rules)


# ---- models ---------------------------------------------------------------------------------------------------------

MODEL = fp8.GPTConfig(
    vocab_size=32, num_layers=3, num_heads=2, hidden_size=32, max_seq_len=32, activation="swiglu", norm="rmsnorm",
    positions="rotary",
)  # fmt: skip
SHORT, CURRENT = fp8.DelayedScaling(amax_history_len=4), fp8.CurrentScaling()
LAYER_RULES = {"layer_0/.*": None, "layer_1/mlp/down": None, "layer_1/mlp/.*": CURRENT, ".*": SHORT}
TOKENS = jax.random.randint(jax.random.key(0), (4, 17), 0, 32)


def explained(model, variables):
    """For each GEMM of the layers, whether it is in FP8."""
    gemms = fp8.explain(lambda variables: model.apply(variables, TOKENS[:, :-1]), variables)
    return [(gemm.layer, gemm.is_fp8) for gemm in gemms if gemm.layer]


def steps(model, recipe, **options):
    tx = fp8.fused_adamw(1e-2)
    state = fp8.TrainState.create(variables=model.init(jax.random.key(1), TOKENS[:, :-1]), tx=tx)
    step = fp8.make_train_step(fp8.next_token_loss(model), tx, recipe, **options)
    state = step.place(state, TOKENS) if "parallel" in options else state
    losses = []
    for _ in range(4):
        state, metrics = step(state, TOKENS)
        losses.append(float(metrics["loss"]))
    return losses, state


@functools.cache
def losses_by(recipe):
    """Of a model with one recipe."""
    return steps(fp8.GPT(MODEL, recipe=recipe), recipe)[0]


@functools.cache
def by_rules():
    return steps(fp8.GPT(MODEL, recipe=LAYER_RULES), LAYER_RULES)


def test_layers_have_the_recipes_of_their_rules():
    model = fp8.GPT(MODEL, recipe=LAYER_RULES)
    variables = model.init(jax.random.key(1), TOKENS[:, :-1])
    assert sorted(variables["fp8"]) == ["layer_1", "layer_2"]
    assert sorted(variables["fp8"]["layer_1"]) == ["attention"] and len(variables["fp8"]["layer_2"]["mlp"]) == 2
    in_fp8 = [layer.split("/", 1)[1] for layer, is_fp8 in explained(model, variables) if is_fp8]
    parts = {"attention/query+key+value", "attention/out", "mlp/gate+up"}
    expected = {f"layer_{index}/{part}/fprop" for index in (1, 2) for part in parts} | {"layer_2/mlp/down/fprop"}
    assert set(in_fp8) == expected


def test_rules_of_one_recipe_are_that_recipe_bit_for_bit():
    losses, state = steps(fp8.GPT(MODEL, recipe={".*": SHORT}), {".*": SHORT})
    expected, other = steps(fp8.GPT(MODEL, recipe=SHORT), SHORT)
    assert losses == expected
    jax.tree.map(np.testing.assert_array_equal, state.params, other.params)
    assert steps(fp8.GPT(MODEL, recipe={".*": None}), {".*": None})[0] == losses_by(None)


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}])
def test_steps_with_rules_learn_and_fill_the_histories(options):
    losses, state = steps(fp8.GPT(MODEL, recipe=LAYER_RULES), LAYER_RULES, **options)
    assert losses[-1] < losses[0] - 0.3
    np.testing.assert_allclose(losses, losses_by(None), rtol=0.05)
    assert losses not in (losses_by(None), losses_by(SHORT))
    for gemm in jax.tree.leaves(state.fp8, is_leaf=lambda node: "scale" in node):
        assert np.all(np.asarray(gemm["amax_history"])[:, 1:] > 0)


def test_on_a_mesh_rules_give_the_losses_of_one_device():
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"))
    alone, _ = by_rules()
    split, _ = steps(fp8.GPT(MODEL, recipe=LAYER_RULES), LAYER_RULES, parallel=mesh)
    np.testing.assert_allclose(split, alone, rtol=0.02)


def test_generated_text_is_that_of_the_forward():
    model = fp8.GPT(MODEL, recipe=LAYER_RULES)
    _, state = by_rules()
    found = fp8.generate(model, state.variables, TOKENS[:, :8], max_new_tokens=4)
    logits = model.apply(state.variables, jnp.concatenate([TOKENS[:, :8], found], axis=1)[:, :-1])
    likeliest = jnp.argmax(logits[:, 7:], axis=-1)
    assert np.mean(np.asarray(likeliest == found)) > 0.9


def test_a_mixture_of_experts_has_its_own_rule():
    config = fp8.GPTConfig(
        vocab_size=32, num_layers=1, num_heads=2, hidden_size=128, max_seq_len=32, activation="swiglu", num_experts=2,
        experts_per_token=1,
    )  # fmt: skip
    rules = {".*/mlp/.*": fp8.BlockScaling(), ".*": SHORT}
    variables = fp8.GPT(config, recipe=rules).init(jax.random.key(0), TOKENS[:, :-1])
    assert sorted(variables["fp8"]["layer_0"]) == ["attention"]
    losses, _ = steps(fp8.GPT(config, recipe=rules), rules)
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="all kernels of experts must be in FP8 or none"):
        fp8.GPT(config, recipe={".*/down": None, ".*": SHORT}).init(jax.random.key(0), TOKENS[:, :-1])


def test_another_recipe_in_the_step_is_refused():
    with pytest.raises(ValueError, match="the recipe of make_train_step must be that of the model's layers"):
        steps(fp8.GPT(MODEL, recipe=LAYER_RULES), fp8.DelayedScaling(amax_history_len=4, margin=1))
