"""Names of variants in benchmarks/variants.py: what each trains with, and what is no name."""

import jax.numpy as jnp
import pytest

import jax_fp8 as fp8


@pytest.fixture
def variants(benchmark):
    return benchmark("variants")


def model(variants, name):
    return variants.Variant.parse(name).model(variants.SHAPES["tiny_llama"].config)


def test_options_change_what_they_name(variants):
    assert model(variants, "delayed") == fp8.GPT(variants.SHAPES["tiny_llama"].config, recipe=fp8.DelayedScaling())
    fast = model(variants, "delayed_fast_head_attention_recompute_bf16")
    assert fast.recipe == fp8.DelayedScaling(split_accumulator=()) and fast.head_recipe == fp8.CurrentScaling()
    assert fast.fp8_attention and fast.recompute and fast.param_dtype == jnp.bfloat16
    assert model(variants, "block_1d1d").recipe == fp8.BlockScaling(wgrad="1d1d")
    assert model(variants, "block_head").head_recipe == fp8.BlockScaling()
    small = model(variants, "ours_bf16_small")
    assert small.recipe is None and small.remat == "norms" and small.param_dtype == jnp.bfloat16
    names = ["bf16", "current_fast_cached", "ours_bf16_small"]
    assert [str(variants.Variant.parse(name)) for name in names] == [
        "plain Flax, bfloat16",
        "jax_fp8, `CurrentScaling`, fast accumulation, weights in FP8 in the state",
        'jax_fp8, `recipe=None`, bfloat16 params with remainders, bfloat16 moments, `remat="norms"`',
    ]


@pytest.mark.parametrize(
    "name", ["", "delay", "delayed_", "delayed_fat", "delayed_fast_fast", "delayed_1d1d", "bf16_fast", "ours_bf16_head"]
)
def test_what_is_no_variant_is_refused(variants, name):
    with pytest.raises(ValueError, match=f"a variant must be bf16 or flax_direct, or a trainer .* got '{name}'"):
        variants.Variant.parse(name)


def test_the_page_names_every_option(variants):
    page = (variants.__file__).replace("variants.py", "README.md")
    with open(page) as file:
        text = file.read()
    assert all(
        f"`{name}`" in text for name in (*variants.PLAIN, *variants.RECIPES, *variants.SHAPES) if "tiny" not in name
    )
    assert all(f"| `_{option}` |" in text for option in variants.OPTIONS)
