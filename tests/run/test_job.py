"""What is made of settings: the model in a recipe, its step, and the text that it reads."""

import dataclasses

import pytest

from jax_fp8.core.recipe import BlockScaling, CurrentScaling
from jax_fp8.models.config import GPTConfig
from jax_fp8.plan.choices import RECIPES
from jax_fp8.run.checks import check
from jax_fp8.run.data import read_data
from jax_fp8.run.job import make_model, parallelism, prepare
from jax_fp8.run.settings import Settings, defaults, parse

SMALL = "--num-layers 1 --hidden-size 32 --num-heads 2 --batch-size 4 --seq-len 16".split()
STAGES = "--num-layers 2 --hidden-size 32 --num-heads 2 --batch-size 4 --microbatches 2 --seq-len 16".split()
STAGES += ["--mesh", "pipe=2"]


def test_the_head_of_a_model_by_tile_is_by_tile(book):
    made = prepare(parse([*SMALL, "--data", str(book), "--recipe", "block", "--fp8-head"]))
    model = make_model(made.settings, made.model, "block")
    assert model.recipe == model.head_recipe == BlockScaling()


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_flags_choose_what_is_in_fp8_and_how_it_adds(name, book, tmp_path):
    plain, quick = (prepare(parse([*SMALL, "--data", str(book), *flags])) for flags in ([], ["--fast", "--fp8-head"]))

    def model(made, recipe):
        return make_model(made.settings, made.model, recipe)

    assert model(plain, name).head_recipe is None
    assert model(plain, name).recipe == RECIPES[name]
    assert model(quick, name).head_recipe == CurrentScaling()
    assert model(quick, name).recipe.split_accumulator == ()
    baseline = model(quick, "bf16")
    assert (baseline.recipe, baseline.head_recipe) == (None, None)


def test_attention_in_fp8(book):
    wide = [*SMALL, "--data", str(book), "--fp8-attention", "--hidden-size", "256", "--num-heads", "2"]
    made = prepare(parse([*wide, "--seq-len", "128"]))
    assert make_model(made.settings, made.model, "delayed").fp8_attention
    assert not make_model(made.settings, made.model, "bf16").fp8_attention
    with pytest.raises(ValueError, match="--fp8-attention needs --seq-len to be a multiple of 128, got 64"):
        check(parse([*wide, "--seq-len", "64"]))
    with pytest.raises(ValueError, match=r"FP8 attention needs a head_dim of 128, .* got 64; change the heads"):
        prepare(parse([*wide, "--seq-len", "128", "--num-heads", "4"]))


def test_what_a_step_is_told_of_a_pipeline(book):
    def told(*flags):
        return parallelism(prepare(parse([*STAGES, "--data", str(book), *flags])))

    assert dict(told().mesh.shape) == {"pipe": 2, "data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
    assert (told().schedule, told().chunks) == ("1f1b", 1)
    chosen = told("--schedule", "interleaved", "--chunks", "3", "--num-layers", "6")
    assert (chosen.schedule, chosen.chunks) == ("interleaved", 3)


def test_what_layers_keep_is_the_models():
    chosen, config = dataclasses.replace(defaults("tiny"), remat="offload:2"), GPTConfig.preset("tiny")
    assert {make_model(chosen, config, recipe).remat for recipe in ("bf16", "delayed", "current")} == {"offload:2"}


def test_validation_data_of_its_own(book, tmp_path):
    """Then nothing of the other is held out."""
    other = tmp_path / "other.txt"
    other.write_text("another book " * 9)
    _, train, held_out = (
        part if number == 0 else part.tokens for number, part in enumerate(read_data(Settings(data=book)))
    )
    assert bytes(train) + bytes(held_out) == book.read_bytes() and len(held_out) == len(book.read_bytes()) // 20
    _, train, held_out = (
        p if i == 0 else p.tokens for i, p in enumerate(read_data(Settings(data=book, validation_data=other)))
    )
    assert (bytes(train), bytes(held_out)) == (book.read_bytes(), other.read_bytes())
