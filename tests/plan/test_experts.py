"""What a plan takes for granted of a mixture of experts, beside a model's params and rows that are really sorted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.inspect.hlo import read_hlo
from jax_fp8.ops.expert_rows import sort_tokens
from jax_fp8.plan.experts import filled_rows, idle_params
from jax_fp8.plan.rates import rates_of
from jax_fp8.plan.step_time import estimate

TINY = fp8.GPTConfig.preset("tiny-moe")
# One operation, and one byte on the wire, a second.
ONE = dataclasses.replace(
    rates_of("h200"),
    **(dict.fromkeys(("fp8", "fp8_split"), ((1.0, 1.0),)) | dict.fromkeys(("collective", "launch", "beside"), 0.0)),
    **{"memory": 1e30, "wire": 1.0},
)
HLO = """HloModule step, is_scheduled=true, num_partitions=4

ENTRY %main (x: f8e4m3fn[64,16]) -> bf16[64,8] {
  %rows = f8e4m3fn[64,16]{1,0} parameter(0)
  %kernels = f8e4m3fn[4,8,16]{2,1,0} parameter(1)
  %starts = s32[5]{0} parameter(2)
  %x = f8e4m3fn[16,64]{1,0} parameter(3)
  %dy = f8e5m2[8,64]{1,0} parameter(4)
  %s = f32[] parameter(5)
  %own = bf16[8,16]{1,0} parameter(6)
  %room = bf16[64,16]{1,0} parameter(7)
  %n = s32[4]{0} parameter(8)
  CALL
}
"""
GROUPED = {
    "rows": 'bf16[64,8]{1,0} custom-call(%rows, %kernels, %s, %s, %starts), custom_call_target="jax_fp8_grouped_gemm"',
    "weight gradient": "f32[4,16,8]{2,1,0} custom-call(%x, %dy, %s, %s, %starts), "
    'custom_call_target="jax_fp8_grouped_gemm_weight_gradient"',
}
EXCHANGE = "bf16[64,16]{1,0} ragged-all-to-all(%own, %room, %n, %n, %n, %n), channel_id=1, replica_groups={{0,1,2,3}}"


def time_of(call, filled=1.0):
    return estimate(read_hlo(HLO.replace("CALL", f"%d = {call}")), ONE, filled=filled)


@pytest.mark.parametrize("name", GROUPED)
def test_a_grouped_product_multiplies_each_row_by_one_kernel(name):
    """Of the rows that are filled; its rate is somewhat less than that of one product of all rows."""
    whole, half = (time_of(GROUPED[name], filled).seconds for filled in (1.0, 0.5))
    assert half == pytest.approx(whole / 2)
    assert 0.8 < 2 * 64 * 16 * 8 / whole < 1


def test_rows_that_travel_are_counted_once():
    """A ragged exchange sends the smaller of operand and result, here to three of four devices."""
    assert time_of(EXCHANGE).wire_bytes == 2 * 8 * 16 * 3 / 4


def count(config):
    model = fp8.GPT(config, recipe=None)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "config",
    [TINY, dataclasses.replace(TINY, activation="gelu"), dataclasses.replace(TINY, dense_layers=(0,), num_experts=8)],
    ids=["gated", "plain", "a dense layer"],
)
def test_params_that_a_token_does_not_use(config):
    """A model with as many experts as a token has uses all of them, and has a smaller router."""
    layers = sum(config.layer_fields(index)["num_experts"] > 0 for index in range(config.num_layers))
    of_router = layers * config.hidden_size * (config.num_experts - config.experts_per_token)
    used = count(dataclasses.replace(config, num_experts=config.experts_per_token))
    assert count(config) - idle_params(config) == used + of_router


def test_params_of_qwen3():
    """The name of the model says how many a token uses, in billions: 3 of 30."""
    config = fp8.GPTConfig.preset("qwen3-30b-a3b")
    whole = count(config)
    assert whole / 1e9 == pytest.approx(30.5, abs=0.1)
    assert (whole - idle_params(config)) / 1e9 == pytest.approx(3.3, abs=0.1)


def test_rows_that_are_filled():
    """Beside rows that are sorted, whose experts are chosen at random. Negative control: half as many tokens."""
    config, tokens = dataclasses.replace(TINY, num_experts=128), 12_288
    random = np.random.default_rng(0)
    choices = np.stack([random.permutation(128)[:2] for _ in range(tokens)]).astype(np.int32)
    where = sort_tokens(jnp.asarray(choices), 128)
    share = float(where.starts[-1]) / where.pairs.size
    assert filled_rows(config, tokens, 1) == pytest.approx(share, rel=0.02)
    assert filled_rows(config, tokens // 2, 1) < 0.95 * share


def test_experts_on_several_devices_have_room_for_the_rows_of_all():
    config = fp8.GPTConfig.preset("qwen3-30b-a3b")
    shares = [filled_rows(config, 2**20, devices) for devices in (1, 2, 4, 8)]
    np.testing.assert_allclose(shares, [1, 1 / 2, 1 / 4, 1 / 8], rtol=0.02)
    limited = filled_rows(dataclasses.replace(config, capacity_factor=1.25), 2**20, 8)
    assert limited == pytest.approx(1 / 1.25, rel=0.02)
