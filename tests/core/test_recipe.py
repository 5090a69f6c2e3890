"""Recipes are values with defaults that work and errors that say what to do."""

import dataclasses

import pytest

from jax_fp8.core.formats import HYBRID
from jax_fp8.core.recipe import CurrentScaling, DelayedScaling, check_recipe

pytestmark = pytest.mark.versions


def test_defaults():
    assert dataclasses.asdict(DelayedScaling()) == {
        "fp8_format": dataclasses.asdict(HYBRID),
        "margin": 0,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "forget_outliers": False,
        "split_accumulator": ("dgrad", "wgrad"),
    }
    assert dataclasses.asdict(CurrentScaling()) == {
        "fp8_format": dataclasses.asdict(HYBRID),
        "power_2_scale": False,
        "amax_epsilon": 0.0,
        "split_accumulator": ("dgrad", "wgrad"),
    }


@pytest.mark.parametrize("recipe", [DelayedScaling, CurrentScaling])
def test_a_recipe_is_a_value(recipe):
    assert recipe() == recipe() and hash(recipe()) == hash(recipe())
    assert recipe() != recipe(split_accumulator=())
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe().fp8_format = None
    with pytest.raises(TypeError):
        recipe(HYBRID)  # keywords only


def test_recipes_of_different_kinds_differ():
    assert DelayedScaling() != CurrentScaling()


@pytest.mark.parametrize("split_accumulator", [(), ("fprop",), ("fprop", "dgrad", "wgrad")])
def test_split_accumulator_takes_any_of_the_gemms(split_accumulator):
    assert DelayedScaling(split_accumulator=split_accumulator).split_accumulator == split_accumulator


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DelayedScaling(amax_history_len=0), "amax_history_len must be an integer of at least 1, got 0"),
        (lambda: DelayedScaling(amax_history_len=1.5), "amax_history_len must be an integer of at least 1, got 1.5$"),
        (lambda: DelayedScaling(amax_history_len=4.0), "amax_history_len must be an integer .*, got 4.0; pass 4$"),
        (lambda: DelayedScaling(amax_history_len="4"), "amax_history_len must be an integer of at least 1, got '4'"),
        (lambda: DelayedScaling(amax_history_len=True), "amax_history_len must be an integer of at least 1, got True"),
        (lambda: DelayedScaling(forget_outliers="no"), "forget_outliers must be True or False, got 'no'"),
        (lambda: DelayedScaling(margin="a"), "margin must be an integer from -126 to 126, got 'a'"),
        (lambda: DelayedScaling(margin=1000), "margin must be an integer from -126 to 126, got 1000"),
        (lambda: DelayedScaling(margin=-127), "margin must be an integer from -126 to 126, got -127"),
        (lambda: DelayedScaling(margin=0.5), "margin must be an integer from -126 to 126, got 0.5"),
        (
            lambda: DelayedScaling(amax_compute_algo="mean"),
            'amax_compute_algo must be "max" or "most_recent", got \'mean\'',
        ),
        (
            lambda: DelayedScaling(split_accumulator=("forward",)),
            "split_accumulator must be a tuple .*'fprop', 'dgrad', 'wgrad'.* got .'forward'",
        ),
        (
            lambda: CurrentScaling(split_accumulator="dgrad"),
            "split_accumulator must be a tuple of names .* got 'dgrad'",
        ),
        (lambda: CurrentScaling(split_accumulator=["dgrad"]), r"split_accumulator must be a tuple .* got \['dgrad'\]"),
        (lambda: CurrentScaling(split_accumulator=(["dgrad"],)), r"split_accumulator must be .* got \(\['dgrad'\],\)"),
        (lambda: CurrentScaling(amax_epsilon=-1.0), "amax_epsilon must be a finite number that is not neg.*, got -1.0"),
        (lambda: CurrentScaling(amax_epsilon=float("nan")), "amax_epsilon must be a finite number .* got nan"),
        (lambda: CurrentScaling(amax_epsilon=float("inf")), "amax_epsilon must be a finite number .* got inf"),
        (lambda: CurrentScaling(amax_epsilon=1e300), r"amax_epsilon must be a finite number .* got 1e\+300"),
        (lambda: CurrentScaling(amax_epsilon="x"), "amax_epsilon must be a finite number .* got 'x'"),
        (lambda: CurrentScaling(power_2_scale="no"), "power_2_scale must be True or False, got 'no'"),
        (lambda: DelayedScaling(fp8_format="hybrid"), "fp8_format must be a Format, got 'hybrid'; pass jax_fp8.HYBRID"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("recipe", [None, DelayedScaling(), CurrentScaling()])
def test_check_recipe_passes(recipe):
    check_recipe(recipe)


@pytest.mark.parametrize("recipe", ["delayed", DelayedScaling, {}, False])
def test_check_recipe_refuses_everything_else(recipe):
    with pytest.raises(ValueError, match=r"recipe must be DelayedScaling\(...\), CurrentScaling\(...\) or None, got "):
        check_recipe(recipe)
