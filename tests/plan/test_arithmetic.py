"""Arithmetic of a step: params as a model has them, bytes that each axis divides, and an order of meshes by time.

tests/plan/test_gpt_plans.py compares with compiled steps.
"""

from dataclasses import replace

import pytest

from jax_fp8.parallel.schedules import make_schedule
from jax_fp8.parallel.ticks import make_ticks
from jax_fp8.parallel.timeline import make_timeline
from jax_fp8.plan.arithmetic import (
    bytes_of_a_token,
    host_bytes_of,
    host_seconds_of,
    memory_of,
    operations_of,
    seconds_of,
)
from jax_fp8.plan.rates import rates_of
from jax_fp8.plan.setting import Setting
from jax_fp8.plan.shape import Shape

GPT = Shape(layers=4, width=1024, heads=16, kv_heads=16, mlp=4096, vocab=50_304)
LLAMA = Shape(layers=4, width=1024, heads=16, kv_heads=4, mlp=3584, vocab=50_304, is_gated=True, is_tied=False)
WIDE = replace(LLAMA, head_dim=128)
BASE = Setting(shape=GPT, batch=64, sequence=1024)
RATES = rates_of("h200")


def test_what_a_layer_keeps_of_a_token():
    """The table of docs/explanation/memory.md: 23 widths, 20 with recompute; `tensor` divides some of it."""
    h = GPT.width
    assert bytes_of_a_token(BASE) == 23 * h and bytes_of_a_token(replace(BASE, recompute=True)) == 20 * h
    split = replace(BASE, tensor=4)
    assert bytes_of_a_token(split) == (4 + 2) * h + (8 + 8 + 1) * h / 4
    assert bytes_of_a_token(replace(split, sequence_parallel=True)) == 2 * h + (4 + 8 + 8 + 1) * h / 4
    wide, queries = replace(split, shape=WIDE, recompute=True), 2 * h
    assert bytes_of_a_token(wide) == 4 * h + 4 * queries / 4 + 4 * (queries / 4) / 4 + 4 * 3584 / 4
    few_keys = replace(BASE, shape=LLAMA, tensor=8, recompute=True)
    assert bytes_of_a_token(few_keys) == 4 * h + 4 * h / 8 + 4 * (h / 4) / 4 + 4 * 3584 / 8  # keys in 4 parts only


def test_what_scales_by_tile_add():
    """4 bytes to 128 of what is kept in FP8, 3 of the 23 widths; slower products, and weights that a step casts."""
    by_tile, h = replace(BASE, by_tile=True), GPT.width
    assert bytes_of_a_token(by_tile) == (20 + 3 * (1 + 4 / 128)) * h
    assert bytes_of_a_token(replace(by_tile, recompute=True)) == 20 * h
    assert memory_of(by_tile).weights == memory_of(BASE).weights
    seconds = [seconds_of(setting, RATES) for setting in (BASE, by_tile, replace(BASE, fp8=False))]
    assert seconds == sorted(seconds) and seconds[1] > 1.05 * seconds[0]


def test_what_divides_the_state():
    one, axes = memory_of(BASE), {"fsdp": 4, "tensor": 2}
    split = memory_of(replace(BASE, **axes))
    assert one.params == 4 * (GPT.of_layers + GPT.of_tables) and one.optimizer == 2 * one.params
    assert (split.params, split.optimizer) == (one.params / 8, one.optimizer / 8)
    assert memory_of(replace(BASE, data=8)).params == one.params
    assert memory_of(replace(BASE, bf16_moments=True)).optimizer == one.optimizer / 2
    narrow = memory_of(replace(BASE, bf16_params=True))
    assert narrow.params + narrow.optimizer == one.params + one.optimizer  # the remainders are kept
    assert narrow.gradients == one.gradients / 2


def test_microbatches_divide_activations_and_keep_sums():
    one, four = memory_of(BASE), memory_of(replace(BASE, microbatches=4))
    assert four.activations == one.activations / 4
    assert (one.sums, four.sums) == (0, 4 * (GPT.of_layers + GPT.of_tables))
    assert four.weights == 2 * one.weights == 2 * GPT.of_layers


def test_gradients_are_whole_until_they_are_summed():
    large = replace(BASE, batch=8, fsdp=8, tensor=2)
    found, everything = memory_of(large), (GPT.of_layers + GPT.of_tables) / 2
    assert found.gradients == 4 * everything * (1 + 1 / 8) > found.activations
    state = found.params + found.optimizer + found.tables
    assert found.together == state + max(found.gradients, found.weights + found.activations)


def test_bfloat16_keeps_more_and_takes_longer():
    bf16 = replace(BASE, fp8=False)
    assert bytes_of_a_token(bf16) > bytes_of_a_token(BASE) and seconds_of(bf16, RATES) > seconds_of(BASE, RATES)


def test_recompute_keeps_the_same_of_both():
    """In bfloat16 most of what goes from tick to tick, also what is in float32."""
    for pipe in (1, 2):
        bf16, in_fp8 = replace(BASE, pipe=pipe, fp8=False), replace(BASE, pipe=pipe)
        kept = [bytes_of_a_token(replace(of, recompute=True)) for of in (bf16, in_fp8)]
        assert kept[0] == kept[1] < bytes_of_a_token(in_fp8)
    assert bytes_of_a_token(bf16) > 3 * kept[0]
    assert seconds_of(replace(bf16, recompute=True), RATES) < seconds_of(bf16, RATES)


def test_operations():
    assert operations_of(BASE) == 6 * 64 * 1024 * (GPT.of_layers + GPT.of_tables + 4 * 1024 * 1024)
    llama = operations_of(replace(BASE, shape=LLAMA))  # a token reads one row of the embedding
    assert llama == 6 * 64 * 1024 * (LLAMA.of_layers + LLAMA.of_tables / 2 + 4 * 1024 * 1024)


def test_devices_share_the_time():
    one, two = seconds_of(BASE, RATES), seconds_of(replace(BASE, data=2), RATES)
    assert 0.5 * one < two < 0.7 * one


def test_hosts_matter_where_an_axis_joins_them():
    """Where all of an axis is on one host, the network does not."""
    slow = replace(RATES, between_hosts=1e9)

    def lost(**axes):
        setting = replace(BASE, **axes)
        return seconds_of(setting, slow) - seconds_of(setting, RATES)

    assert lost(fsdp=8) == lost(tensor=8) == lost(data=2, tensor=4) == 0
    assert lost(fsdp=16) > 0
    assert lost(data=2, tensor=8) > lost(fsdp=2, tensor=8) > 0  # its sums are sent twice


def test_names():
    assert str(replace(BASE, fsdp=4, tensor=2, sequence_parallel=True)) == "fsdp=4,tensor=2, sequence parallel"
    assert str(BASE) == "data=1" and replace(BASE, data=3, tensor=2).devices == 6


def test_gpus_of_a_host_send_to_others_at_the_same_time():
    """16 GPUs over `fsdp`: 8 cards at 10 GB/s are as good as a wire of 80."""
    setting = replace(BASE, fsdp=16, batch=16)
    cards, wire = (replace(RATES, **rates) for rates in ({"between_hosts": 10e9}, {"wire": 80e9}))
    assert seconds_of(setting, cards) == seconds_of(setting, wire) > seconds_of(setting, RATES)


SCHEDULES = [
    (name, stages, microbatches, chunks)
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1))
    for stages, microbatches in ((2, 2), (2, 4), (4, 8), (4, 12), (8, 16), (8, 24), (8, 64))
]


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), SCHEDULES)
def test_bubble_and_slots_are_those_of_the_schedule(name, stages, microbatches, chunks):
    setting = replace(BASE, pipe=stages, microbatches=microbatches, schedule=name, chunks=chunks)
    schedule = make_schedule(name, stages, microbatches, chunks)
    assert setting.bubble == pytest.approx(make_timeline(schedule).bubble)
    assert setting.slots == sum(make_ticks(schedule).slots) / chunks


def test_stages_divide_the_state_and_what_they_compute_with():
    """Of 4 stages with 4 microbatches, all of which `gpipe` keeps: as many layers in all as without stages."""
    one = memory_of(replace(BASE, microbatches=4))
    four = replace(BASE, microbatches=4, pipe=4, schedule="gpipe")
    found = memory_of(four)
    assert (found.params, found.optimizer, found.weights) == (one.params / 4, one.optimizer / 4, one.weights / 4)
    assert found.sums == 4 * (GPT.of_layers / 4 + GPT.of_tables) and found.tables == 3 * 4 * GPT.of_tables
    rows = four.tokens
    layers = rows * bytes_of_a_token(BASE)
    edge, logits = 4 * GPT.width, GPT.vocab
    assert found.activations == (4 * 1 + 2) * layers + 2 * rows * (edge + logits)
    halves = memory_of(replace(four, schedule="zero-bubble"))
    assert halves.activations - found.activations == 4 * 13 * GPT.width * rows
    split = memory_of(replace(four, tensor=2))
    assert split.weights == found.weights / 2 and split.sums == found.sums / 2 < one.sums


def test_stages_take_their_share_of_the_time_a_bubble_and_transfers():
    one = replace(BASE, microbatches=8)
    stages = replace(one, pipe=4)
    free = replace(RATES, wire=1e30)
    layers = seconds_of(one, free) / 4 / (1 - stages.bubble)
    assert seconds_of(stages, free) == pytest.approx(layers, rel=1e-6)
    assert seconds_of(stages, free) < seconds_of(stages, RATES) < seconds_of(replace(stages, chunks=1, pipe=2), RATES)
    apart = replace(BASE, microbatches=16, pipe=16)  # neighbours on two hosts: a card for each pair
    lost = seconds_of(apart, replace(RATES, between_hosts=10e9)) - seconds_of(apart, replace(RATES, between_hosts=20e9))
    sent = 2 * (16 + 15) * 2 * 2 * apart.tokens * GPT.width
    assert lost > sent / 20e9


def test_what_plan_is_told():
    setting = replace(BASE, pipe=2, tensor=2, sequence_parallel=True, schedule="interleaved", chunks=3, microbatches=8)
    flags = "--mesh pipe=2,tensor=2 --sequence-parallel --schedule interleaved --chunks 3 --microbatches 8"
    assert setting.flags == flags
    assert str(setting) == "pipe=2,tensor=2, sequence parallel, interleaved of 3 chunks, 8 microbatches"
    assert BASE.flags == "--mesh data=1"


def test_what_the_host_keeps_frees_as_much_and_is_waited_for():
    """Of 12 layers of GPT-3 1.3B on one H200: 2.62 GiB of 2.64 freed, 66 % longer (docs/performance.md)."""
    small = replace(BASE, shape=replace(GPT, layers=12, width=2048, heads=16, kv_heads=16, mlp=8192), batch=8)
    small = replace(small, sequence=2048)
    none, third, sixth = (replace(small, offloaded=n) for n in (0, 4, 2))
    freed = memory_of(none).activations - memory_of(third).activations
    assert freed == pytest.approx(host_bytes_of(third))
    assert host_bytes_of(third) / 2**30 == pytest.approx(2.62, abs=0.01)
    assert seconds_of(third, RATES) / seconds_of(none, RATES) == pytest.approx(1.66, abs=0.1)
    assert host_seconds_of(sixth, RATES) == host_seconds_of(none, RATES) == 0
    wide = replace(small, shape=replace(small.shape, layers=6, width=8192, heads=64, kv_heads=64, mlp=32768))
    assert host_seconds_of(replace(wide, offloaded=2), RATES) == 0 < host_bytes_of(replace(wide, offloaded=2))


def test_all_that_is_computed_again_is_a_forward():
    full, norms = replace(BASE, full=True), replace(BASE, recompute=True)
    assert 1 < seconds_of(norms, RATES) / seconds_of(BASE, RATES) < 1.03
    assert bytes_of_a_token(full) == 4.5 * GPT.width < bytes_of_a_token(replace(BASE, recompute=True))
    assert 1.05 < seconds_of(full, RATES) / seconds_of(BASE, RATES) < 1.35
