"""Recipes are values with defaults that work and errors that say what to do."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp8.core.cast import LINE, SQUARE
from jax_fp8.core.formats import E4M3, HYBRID, INPUT, KERNEL, OUTPUT_GRADIENT
from jax_fp8.core.recipe import BlockScaling, CurrentScaling, DelayedScaling, accumulation, check_recipe

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

    assert dataclasses.asdict(BlockScaling()) == {
        "power_2_scale": True,
        "amax_epsilon": 0.0,
        "wgrad": "1d2d",
        "split_accumulator": ("fprop", "dgrad", "wgrad"),
    }


@pytest.mark.parametrize(
    ("recipe", "other"),
    [
        (DelayedScaling, {"split_accumulator": ()}),
        (CurrentScaling, {"split_accumulator": ()}),
        (BlockScaling, {"wgrad": "1d1d"}),
    ],
)
def test_a_recipe_is_a_value(recipe, other):
    assert recipe() == recipe() and hash(recipe()) == hash(recipe())
    assert recipe() != recipe(**other)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe().fp8_format = None
    with pytest.raises(TypeError):
        recipe(HYBRID)  # keywords only


def test_recipes_of_different_kinds_differ():
    assert DelayedScaling() != CurrentScaling() != BlockScaling()


@pytest.mark.parametrize(("wgrad", "coarse"), [("1d2d", SQUARE), ("1d1d", LINE)])
@pytest.mark.parametrize("power_2_scale", [True, False])
def test_the_tiles_of_block_scaling(wgrad, coarse, power_2_scale):
    recipe = BlockScaling(power_2_scale=power_2_scale, amax_epsilon=0.5, wgrad=wgrad)
    assert not recipe.has_state and all(accumulation(recipe, gemm) == "split" for gemm in ("fprop", "dgrad", "wgrad"))

    def measure():
        raise AssertionError("nobody needs the amax of the whole tensor")

    rules = [recipe.cast(tensor, None, measure).rule for tensor in (INPUT, KERNEL, OUTPUT_GRADIENT)]
    assert [(rule.tile, rule.columnwise_tile) for rule in rules] == [(LINE, LINE), (SQUARE, SQUARE), (LINE, coarse)]
    for rule in rules:
        assert rule.dtype == E4M3
        assert float(rule.scale(jnp.float32(300))) == (1 if power_2_scale else np.float32(300) / np.float32(448))
        assert float(rule.scale(jnp.float32(0))) == (2**-9 if power_2_scale else np.float32(0.5) / np.float32(448))


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
        (lambda: BlockScaling(wgrad="2d2d"), 'wgrad must be "1d2d" or "1d1d", got \'2d2d\''),
        (
            lambda: BlockScaling(split_accumulator=()),
            r"split_accumulator of BlockScaling must be .*, got \(\): by tile",
        ),
        (lambda: BlockScaling(power_2_scale=1), "power_2_scale must be True or False, got 1"),
        (lambda: BlockScaling(amax_epsilon=-1.0), "amax_epsilon must be a finite number that is not neg.*, got -1.0"),
        (lambda: DelayedScaling(fp8_format="hybrid"), "fp8_format must be a Format, got 'hybrid'; pass jax_fp8.HYBRID"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("recipe", [None, DelayedScaling(), CurrentScaling(), BlockScaling()])
def test_check_recipe_passes(recipe):
    check_recipe(recipe)


@pytest.mark.parametrize("recipe", ["delayed", DelayedScaling, {}, False])
def test_check_recipe_refuses_everything_else(recipe):
    known = r"recipe must be DelayedScaling\(...\), CurrentScaling\(...\), BlockScaling\(...\) or None, got "
    with pytest.raises(ValueError, match=known):
        check_recipe(recipe)
