"""What a layer hands to an op: scales, a way out, a weight, each where there is one; and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.core.fp8_gemm import Record
from jax_fp8.core.recorder import Recorder, Refs
from jax_fp8.core.shards import TensorParallel
from jax_fp8.ops.layer_gemm import check_multiples_of_16, layer_gemm
from jax_fp8.ops.parameters import LinearParameters
from jax_fp8.ops.weights import cast_gemms

RECIPE = fp8.DelayedScaling(amax_history_len=4)
KERNEL = jnp.ones((32, 16))
PARAMETERS = LinearParameters(KERNEL, None)
SCALES = jnp.float32([1, 2, 3])


def recorder(from_current=False):
    return Recorder(Refs(record=Record(jax.new_ref(jnp.zeros(3))), from_current=from_current))


def test_without_a_recorder_nothing_is_recorded():
    gemm = layer_gemm("dense", RECIPE, PARAMETERS, SCALES)
    assert gemm.scales is SCALES
    assert gemm.record == Record() and not gemm.is_recorded
    gemm.record_forward(jnp.ones(2))  # to nowhere


def test_a_forward_is_recorded_by_maximum():
    own = recorder()
    gemm = layer_gemm("dense", RECIPE, PARAMETERS, SCALES, own)
    assert gemm.is_recorded and gemm.scales is SCALES
    gemm.record_forward(jnp.float32([2, 1]))
    gemm.record_forward(jnp.float32([1, 3]))
    np.testing.assert_array_equal(own.record.amax_ref[...], [2, 3, 0])


def test_a_warm_start_trusts_no_scales():
    assert layer_gemm("dense", RECIPE, PARAMETERS, SCALES, recorder(from_current=True)).scales is None


def test_a_cached_weight_is_taken_if_it_is_of_this_kernel():
    state = {"dense": {"scale": SCALES}}
    weight = cast_gemms({"dense": {"kernel": KERNEL}}, state, {("dense",): RECIPE})["dense"]["kernel"]
    assert layer_gemm("dense", RECIPE, PARAMETERS, SCALES, weight=weight).weight is weight
    other = LinearParameters(jnp.ones((16, 32)), None)
    with pytest.raises(ValueError, match=r"dense: the weight cache must hold float8_e4m3fn of shape \(16, 32\)"):
        layer_gemm("dense", RECIPE, other, SCALES, weight=weight)


def test_sizes_that_fp8_refuses():
    check_multiples_of_16("dense", 32, (16, 48))
    with pytest.raises(ValueError, match="mlp/up: FP8 needs out features divisible by 16, got 24; pad them"):
        check_multiples_of_16("mlp/up", 32, (16, 24))
    with pytest.raises(
        ValueError, match="dense: FP8 needs in features divisible by 16 on each device of tensor=4, got 8"
    ):
        check_multiples_of_16("dense", 8, (16,), TensorParallel("tensor", 4))
