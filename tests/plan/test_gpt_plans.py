"""Plans of GPTs: what arithmetic says beside what was compiled, flags, meshes that are suggested, what helps."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jax_fp8 import cli
from jax_fp8.core.recipe import BlockScaling
from jax_fp8.models.config import GPTConfig
from jax_fp8.plan import gpt_plans
from jax_fp8.plan.arithmetic import bytes_of_a_token, memory_of, seconds_of
from jax_fp8.plan.choices import Choices, init_of, model_of, optimizer_of
from jax_fp8.plan.gpt_plans import operations_of_a_token, rates_for, setting_of
from jax_fp8.plan.rates import RateTable, rates_of
from jax_fp8.plan.step_plan import GIB, Plan
from jax_fp8.plan.step_time import StepTime
from jax_fp8.plan.suggest import meshes_of

BOTH = {"sequence_parallel": True, "recompute": True}
SMALL, MIDDLE, LARGE, LLAMA = ({"preset": name} for name in ("gpt3-1.3b", "gpt3-6.7b", "gpt3-175b", "llama3-8b"))
LLAMA70 = {"preset": "llama3-70b"}

PIPE = {"mesh": "pipe=2", "batch": 32, "microbatches": 8}
CHUNKS = {"schedule": "interleaved", "chunks": 6, "sequence_parallel": True}

# GiB of a device and ms of a step, as `plan` found them by compiling with --fast; of 1.3B, one part, with --fp8-head.
# Times without `pipe` are by the rates of before, some 2 % longer.
COMPILED = [
    (SMALL, 34.59, 161),
    (SMALL | {"recompute": True}, 32.34, 163),
    (SMALL | {"remat": "offload:8"}, 29.34, 287),
    (SMALL | {"remat": "full"}, 20.94, 199),
    (SMALL | {"mesh": "data=2"}, 34.66, 176),
    (SMALL | {"mesh": "fsdp=2"}, 27.27, 166),
    (SMALL | {"mesh": "fsdp=2", "microbatches": 4}, 34.13, 641),
    (SMALL | {"mesh": "fsdp=2", "recipe": "bf16"}, 35.36, 265),
    (SMALL | {"mesh": "tensor=2"}, 19.76, 123),
    (SMALL | {"mesh": "tensor=2", "sequence_parallel": True}, 18.13, 114),
    (SMALL | {"mesh": "fsdp=2,tensor=2", "batch": 16, **BOTH}, 12.55, 126),
    (MIDDLE | {"mesh": "fsdp=4,tensor=2", "sequence_parallel": True}, 38.79, 455),
    (LLAMA | {"mesh": "fsdp=8", "batch": 8}, 50.16, 566),
    (LLAMA | {"mesh": "fsdp=4,tensor=2", "batch": 16, "microbatches": 2, "sequence_parallel": True}, 65.28, 1193),
    (LARGE | {"mesh": "fsdp=8,tensor=8", "batch": 64, **BOTH}, 119.10, 5014),
    (LLAMA70 | {"mesh": "fsdp=8,tensor=8", "batch": 128, "microbatches": 8, **BOTH}, 91.7, 12_697),
    (SMALL | PIPE | {"batch": 16}, 21.73, 231),
    (SMALL | PIPE, 31.30, 395),
    (SMALL | PIPE | {"schedule": "interleaved"}, 26.68, 379),
    (SMALL | PIPE | {"schedule": "zero-bubble"}, 40.75, 384),
    (SMALL | PIPE | {"microbatches": 16}, 21.86, 417),
    (SMALL | PIPE | {"recipe": "bf16"}, 99.49, 719),
    (SMALL | PIPE | {"sequence": 1024, "batch": 64}, 31.28, 362),
    (LARGE | {"mesh": "pipe=8,tensor=8", "batch": 64, "microbatches": 64, **CHUNKS}, 61.28, 3550),
    (LLAMA70 | {"mesh": "data=2,fsdp=4,tensor=8", "batch": 128, "microbatches": 8, **BOTH}, 104.0, 12_779),
]


@pytest.mark.parametrize(
    ("flags", "gib", "ms"), COMPILED, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_arithmetic_is_close_to_what_was_compiled(flags, gib, ms):
    setting = setting_of(Choices(**flags))
    assert memory_of(setting).together / GIB == pytest.approx(gib, rel=0.03)
    assert 1e3 * seconds_of(setting, rates_of("h200")) == pytest.approx(ms, rel=0.25)


@pytest.mark.parametrize(("preset", "params"), [("gpt2-124m", 124e6), ("gpt3-1.3b", 1.3e9)])
def test_a_token_takes_six_operations_a_param_and_attention(preset, params):
    config = GPTConfig.preset(preset)
    attention = 6 * config.num_layers * config.hidden_size * config.max_seq_len
    assert operations_of_a_token(config) == pytest.approx(6 * params + attention, rel=0.02)
    longer = dataclasses.replace(config, max_seq_len=2 * config.max_seq_len)
    assert operations_of_a_token(longer) - operations_of_a_token(config) == pytest.approx(attention)
    frozen = operations_of_a_token(config, is_frozen=True)  # no gradients of weights
    assert frozen == pytest.approx(4 * params + attention, rel=0.02)


def test_flags_are_what_a_model_and_its_optimizer_have():
    model = model_of(Choices(preset="tiny", fast=True, fp8_head=True, recompute=True, bf16_params=True))
    assert model.recipe.split_accumulator == () and model.head_recipe is not None and model.recompute
    assert model.param_dtype == jnp.bfloat16 and model.attention_implementation == "cudnn"
    assert model_of(Choices(preset="tiny", remat="offload:1")).remat == "offload:1"
    plain = model_of(Choices(preset="tiny", recipe="bf16", fast=True, sequence=64))
    block = model_of(Choices(preset="tiny", recipe="block", fp8_head=True))
    assert block.recipe == block.head_recipe == BlockScaling()
    assert plain.recipe is None and plain.config.max_seq_len == 64 and plain.param_dtype == jnp.float32


@pytest.mark.parametrize(
    ("flags", "bytes_"),
    [
        ({}, 4 + 8),
        ({"bf16_moments": True}, 4 + 4),
        ({"bf16_params": True}, 2 + 2 + 8),
        ({"bf16_params": True, "bf16_moments": True}, 2 + 2 + 4),
    ],
)
def test_bytes_of_a_param_are_those_of_the_optimizer(flags, bytes_):
    """Of a matrix, as arithmetic has them and as they are."""
    choices = Choices(preset="tiny", **flags)
    setting = setting_of(choices)
    found = memory_of(setting)
    assert found.params + found.optimizer == bytes_ * (setting.shape.of_layers + setting.shape.of_tables)
    dtype = jnp.bfloat16 if choices.bf16_params else jnp.float32
    matrix = jnp.zeros((128, 128), dtype)
    kept = optimizer_of(choices).init({"kernel": matrix})
    arrays = [leaf for leaf in gpt_plans.jax.tree.leaves(kept) if leaf.size == matrix.size]
    assert sum(leaf.nbytes for leaf in [matrix, *arrays]) == bytes_ * matrix.size


def test_attention_in_fp8_keeps_half_and_takes_a_rate_of_its_own():
    plain = setting_of(Choices(preset="llama3-8b", batch=1))
    setting = setting_of(Choices(preset="llama3-8b", batch=1, fp8_attention=True))
    shape = setting.shape
    kept = 2 * shape.query_width + 2 * shape.kv_width
    assert bytes_of_a_token(plain) - bytes_of_a_token(setting) == kept
    rates = rates_of("h200")
    slow = dataclasses.replace(rates, attention_fp8=((1.0, 1e12),))
    assert seconds_of(setting, slow) > 10 * seconds_of(setting, rates)
    assert seconds_of(plain, slow) == seconds_of(plain, rates)
    assert model_of(Choices(preset="llama3-8b", fp8_attention=True)).fp8_attention
    found, left = meshes_of(setting, 2, [2])
    assert all(of.pipe == 1 for of in found)
    assert {of.reason for of in left if of.setting.pipe == 2} == {"a pipeline has no attention in FP8"}


LORA = {"preset": "llama3-8b", "lora": 16, "batch": 1, "sequence": 4096, "remat": "full", "bf16_params": True}


def test_adapters_need_a_byte_for_each_frozen_param():
    """Compiled: 10.98 GiB, and 10.8 GiB on an H200. The whole model has moments and gradients, too."""
    setting = setting_of(Choices(**LORA))
    assert memory_of(setting).together / GIB == pytest.approx(10.98, rel=0.1)
    plain = setting_of(Choices(**(LORA | {"recipe": "bf16"})))
    kernels = setting.shape.of_layers
    assert memory_of(plain).params - memory_of(setting).params == kernels  # two bytes each
    assert memory_of(setting_of(Choices(**(LORA | {"lora": 0})))).together > 60 * GIB
    rank = memory_of(setting_of(Choices(**(LORA | {"lora": 17})))).params - memory_of(setting).params
    model = model_of(Choices(**LORA))
    shapes = jax.eval_shape(init_of(model.clone(attention_implementation=None)), *INIT)
    adapters = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shapes["params"]) if "lora" in str(path)]
    assert rank == 2 * sum(leaf.size for leaf in adapters) / 16
    frozen = sum(leaf.size for leaf in jax.tree.leaves(shapes["fp8_frozen"]) if leaf.ndim == 2)
    assert frozen == kernels
    state = optimizer_of(Choices(**LORA)).init(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), SMALL_PARAMS))
    assert {leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim == 2} == {(32, 16)}


INIT = (jax.random.key(0), jax.ShapeDtypeStruct((1, 16), jnp.int32))
SMALL_PARAMS = {"layer": {"kernel": jnp.zeros((32, 48)), "lora_a": jnp.zeros((32, 16))}}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"lora": -1}, "lora must be an integer of at least 0"),
        ({"lora": 4, "mesh": "pipe=2"}, "--lora plans meshes of data, fsdp and tensor"),
    ],
)
def test_adapters_that_cannot_be_planned(flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        Choices(**({"preset": "llama3-8b"} | flags)).check()


def test_rates_of_a_file_and_of_a_flag(tmp_path):
    RateTable.for_gpu("h200").renewed("here", "now", memory=3e12).save(path := tmp_path / "rates.json")
    assert rates_for(Choices(preset="tiny")) == rates_of("h200")
    found = rates_for(Choices(preset="tiny", rates=str(path), between_hosts=25))
    assert (found.memory, found.between_hosts, found.wire) == (3e12, 25e9, rates_of("h200").wire)


@pytest.fixture
def compiled(monkeypatch):
    """Compiles nothing: a plan needs half of what arithmetic says, or twice of that; what was asked for."""
    asked: list[Choices] = []

    def plan_of(choices, rates, factor=0.5):
        asked.append(choices)
        setting = setting_of(choices)
        peak = int(factor * memory_of(setting).together)
        time = StepTime(1e-3 * len(asked), 0.0, 0.0, 0.0)
        report = FakeReport(peak, 0)
        about, memory = memory_of(setting), 150_109_880_320
        return Plan(0, 0, 0, 0, report, time, rates, memory, setting.devices, 1000, 1e12, about, 0)  # type: ignore

    monkeypatch.setattr(gpt_plans, "get_ready", lambda: None)
    monkeypatch.setattr(gpt_plans, "plan_of", plan_of)
    return asked


@dataclasses.dataclass
class FakeReport:
    argument_bytes: int
    temp_bytes: int
    graphs: int = 1


SUGGEST = ["plan", "--preset", "llama3-8b", "--suggest", "--devices", "64", "--batch", "256"]


def test_suggestions_are_ranked_and_the_rest_is_explained(compiled, capsys):
    assert cli.main([*SUGGEST, "--recompute", "--microbatches", "1", "--bf16-moments", "--tries", "3"]) == 0
    assert len(compiled) == 3 and all(choices.recompute and choices.microbatches == 1 for choices in compiled)
    lines = capsys.readouterr().out.splitlines()
    first = lines.index(next(line for line in lines if line.startswith("mesh ")))
    meshes = [str(setting_of(choices)) for choices in compiled]
    ranked = [line[: gpt_plans.NAMES].strip() for line in lines[first + 1 : first + 4]]
    assert ranked == meshes  # a millisecond more each
    assert all("fits" in line for line in lines[first + 1 : first + 4])
    text = " ".join(line.strip() for line in lines)
    assert "Slower by arithmetic" in text and "Too large by arithmetic (GiB): " in text and " more" in text
    assert "Not tried: " in text and "tensor=16 is more than the 8 GPUs of a host" in text


def test_where_nothing_fits_the_smallest_is_helped(compiled, capsys):
    assert cli.main(["plan", "--preset", "llama3-70b", "--suggest", "--devices", "8", "--batch", "64"]) == 1
    assert compiled == []
    text = capsys.readouterr().out
    assert "None fits into 128.6 GiB. " in text and " GPUs by --mesh" in text


def test_what_does_not_fit_is_helped(compiled, monkeypatch, capsys):
    fake = gpt_plans.plan_of
    monkeypatch.setattr(gpt_plans, "plan_of", lambda choices, rates: fake(choices, rates, factor=1.2))
    argv = ["plan", "--preset", "gpt3-175b", "--mesh", "fsdp=8,tensor=8", "--batch", "64", "--sequence-parallel"]
    assert cli.main(argv) == 1
    said = capsys.readouterr().out
    assert "does not fit\n" in said and "By arithmetic it would fit with\n" in said
    monkeypatch.setattr(gpt_plans, "plan_of", fake)
    assert cli.main(argv) == 0 and "By arithmetic" not in capsys.readouterr().out


REFUSED = {
    "no devices": (["--suggest", "--batch", "64"], "--suggest needs a number of GPUs and a batch"),
    "no batch": (["--suggest", "--devices", "8"], "--suggest needs a number of GPUs and a batch"),
    "a mesh": (["--suggest", "--devices", "8", "--batch", "8", "--mesh", "data=8"], "--suggest tries all meshes"),
    "no GPUs": (["--suggest", "--devices", "0", "--batch", "8"], "devices must be an integer of at least 1, got 0"),
    "no tries": (
        ["--suggest", "--devices", "8", "--batch", "8", "--tries", "0"],
        "tries must be an integer of at least",
    ),
    "devices": (["--devices", "8"], "--devices is for --suggest, got 8 without it"),
    "fast block": (
        ["--recipe", "block", "--fast"],
        "--fast needs a recipe with fast accumulation, got --recipe b",
    ),
    "attention": (
        ["--recipe", "current", "--fp8-attention"],
        "--fp8-attention is for --recipe delayed, got current; leave out one of them",
    ),
    "heads": (["--fp8-attention"], "--preset tiny: FP8 attention needs a head_dim of 128"),
    "rates": (["--rates", "no/such.json"], "rates must be a file that `python -m jax_fp8 tune --rates` wrote"),
    "experts": (
        ["--preset", "tiny-moe", "--suggest", "--devices", "8", "--batch", "8"],
        "--suggest plans models without experts, got --preset tiny-moe; give --mesh",
    ),
    "an axis of experts": (
        ["--mesh", "expert=2"],
        "the axis expert is for a model with experts, got --mesh expert=2 and",
    ),
    "adapters of experts": (["--preset", "tiny-moe", "--lora", "8"], "--lora plans models without experts, got --pre"),
    "hosts": (["--between-hosts", "0"], "--between-hosts must be GB/s above 0, got 0.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_sentence(case, compiled, capsys):
    arguments, message = REFUSED[case]
    assert cli.main(["plan", "--preset", "tiny", *arguments]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("python -m jax_fp8 plan: ") and message in said.err and said.err.count("\n") == 1
    assert said.out == "" and compiled == []


def test_what_layers_keep_is_said_once_and_must_be_known():
    with pytest.raises(ValueError, match=r"--recompute is --remat norms, got also --remat full; give one of them"):
        Choices(preset="tiny", recompute=True, remat="full").check()
    with pytest.raises(ValueError, match=r"remat must be none, norms, full, offload:N with N of 4 layers"):
        Choices(preset="tiny", remat="offload:5").check()
    assert gpt_plans.setting_of(Choices(preset="tiny", remat="norms")).recompute
