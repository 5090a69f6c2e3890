"""What moves between devices: shards are gathered, gradients reduced to shards, amaxes raised, each beside NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import make_mesh, on_devices
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import E4M3, KERNEL
from jax_fp8.core.shards import ParamSharding
from jax_fp8.kernels.quantize import quantize_transpose
from jax_fp8.parallel import transfers
from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.parallel.param_place import ParamPlace
from jax_fp8.parallel.placement import Placement, place_params

AXES = {"data": 2, "fsdp": 2, "tensor": 2}
MESH = jax.sharding.Mesh(np.reshape(jax.devices()[:8], (2, 2, 2)), tuple(AXES))
HOW = Parallelism(MESH)
PARAMS = {
    "kernel": jax.random.normal(jax.random.key(0), (32, 48)),
    "other": jax.random.normal(jax.random.key(1), (16, 16)),
    "bias": jax.random.normal(jax.random.key(2), (16,)),
}
DECLARED = {("kernel",): ParamSharding(-1, 48), ("other",): ParamSharding(dtype=jnp.bfloat16)}
PLACEMENT = place_params(HOW, PARAMS, DECLARED)
EVERY = P(("data", "fsdp", "tensor"))  # one result of each device


def run(function, *args, in_specs, out_specs):
    return on_devices(function, *args, in_specs=in_specs, out_specs=out_specs, **AXES)


def test_shards_of_params_are_gathered_over_fsdp():
    def gather(params):
        whole = transfers.gather_params(PLACEMENT, params, [])
        return {"kernel": whole["kernel"], "other": whole["other"][None], "bias": whole["bias"][None]}

    out = {"kernel": P(None, "tensor"), "other": EVERY, "bias": EVERY}
    found = run(gather, PARAMS, in_specs=(PLACEMENT.specs,), out_specs=out)
    np.testing.assert_array_equal(found["kernel"], PARAMS["kernel"])
    assert found["other"].dtype == jnp.bfloat16  # in the one dtype in which it is read
    for device in range(8):
        np.testing.assert_array_equal(found["other"][device], PARAMS["other"].astype(jnp.bfloat16))
        np.testing.assert_array_equal(found["bias"][device], PARAMS["bias"])


def test_a_kernel_that_is_read_in_fp8_is_not_gathered_and_cannot_be_read():
    def gather(params):
        return transfers.gather_params(PLACEMENT, params, [("kernel",)])["kernel"][None]

    found = run(gather, PARAMS, in_specs=(PLACEMENT.specs,), out_specs=EVERY)
    assert found.shape == (8, 32, 24) and jnp.all(jnp.isnan(found))


def test_a_weight_in_fp8_is_gathered_in_both_orientations():
    cast, kernel = Cast.with_scale(E4M3, jnp.float32(0.02)), PARAMS["kernel"]
    place = ParamPlace(kernel.shape, None, -2)

    def gather(own):
        pair = transfers.gather_weight([place], quantize_transpose(own, cast))
        return pair.rowwise.values[None], pair.columnwise.values[None]

    rowwise, columnwise = run(gather, kernel, in_specs=(P("fsdp"),), out_specs=EVERY)
    expected = quantize_transpose(kernel, cast)
    for device in range(8):
        assert_same_bits(rowwise[device], expected.rowwise.values)
        assert_same_bits(columnwise[device], expected.columnwise.values)
    whole = quantize_transpose(kernel, cast)
    assert transfers.gather_weight([ParamPlace(kernel.shape)], whole) is whole


def test_a_weight_by_tile_is_gathered_with_its_scales():
    kernel = jax.random.normal(jax.random.key(3), (256, 144)) * jnp.exp2(jnp.arange(256) // 64)[:, None]
    place = ParamPlace(kernel.shape, None, -2)
    cast = fp8.BlockScaling().cast(KERNEL, None, None)

    def gather(own):
        return jax.tree.map(lambda x: x[None], transfers.gather_weight([place], quantize_transpose(own, cast)))

    found, expected = run(gather, kernel, in_specs=(P("fsdp"),), out_specs=EVERY), quantize_transpose(kernel, cast)
    for device in range(8):
        for of_all, whole in ((found.rowwise, expected.rowwise), (found.columnwise, expected.columnwise)):
            assert of_all.tile == whole.tile
            assert_same_bits(of_all.values[device], whole.values)
            assert_same_bits(of_all.scale[device], whole.scale)
    assert expected.rowwise.scale.shape == (2, 2) and len(np.unique(expected.rowwise.scale)) > 1


@pytest.mark.parametrize(
    ("shape", "tensor_dim", "is_cut"),
    [
        ((256, 80), None, False),
        ((192, 80), None, True),
        ((256, 80), -1, False),
        ((256, 80), -2, True),
        ((512, 80), -2, False),
    ],
)
def test_squares_that_devices_cut(shape, tensor_dim, is_cut):
    place = ParamPlace(shape, tensor_dim, -2)
    assert transfers.cuts_squares(HOW, [place], fp8.BlockScaling()) == is_cut
    assert not transfers.cuts_squares(HOW, [place], fp8.CurrentScaling())
    assert not transfers.cuts_squares(HOW, [ParamPlace(shape, tensor_dim)], fp8.BlockScaling())  # whole on each device


def test_what_can_be_gathered_as_one_array():
    rows, columns, whole = ParamPlace((4, 4), None, -2), ParamPlace((4, 4), None, -1), ParamPlace((4, 4))
    assert transfers.can_be_gathered_in_fp8([rows, rows]) and transfers.can_be_gathered_in_fp8([whole])
    assert not transfers.can_be_gathered_in_fp8([columns]) and not transfers.can_be_gathered_in_fp8([rows, whole])


def gradients_of_each(shape) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32)


@pytest.mark.parametrize("gradient_dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_gradients_are_summed_over_the_batch_and_each_device_keeps_its_shard(gradient_dtype):
    parallel = Parallelism(MESH, gradient_dtype=gradient_dtype)
    placement = place_params(parallel, PARAMS, DECLARED)
    each = {
        "kernel": gradients_of_each((32, 24)),
        "other": gradients_of_each((16, 16)),
        "bias": gradients_of_each((16,)),
    }
    by_axes = {name: array.reshape(4, 2, *array.shape[1:]) for name, array in each.items()}  # batch parts, tensor

    def reduce(gradients, params):
        own = jax.tree.map(lambda x: x[0], gradients)
        return transfers.reduce_gradients(placement, own, params)

    found = run(reduce, each, PARAMS, in_specs=(EVERY, placement.specs), out_specs=placement.specs)
    expected = {
        "kernel": np.concatenate(list(np.sum(by_axes["kernel"], axis=0)), axis=1),
        "other": np.sum(by_axes["other"], axis=0).mean(axis=0),  # computed alike on all devices of `tensor`
        "bias": np.sum(by_axes["bias"], axis=0).mean(axis=0),
    }
    for name, wanted in expected.items():
        is_rounded = gradient_dtype is not None and wanted.ndim > 1
        np.testing.assert_allclose(found[name], wanted, *((0.03, 0.03) if is_rounded else (1e-5, 1e-5)))
        assert found[name].dtype == jnp.float32
        assert np.array_equal(found[name], wanted.astype(jnp.bfloat16)) is False


STAGES = {"pipe": 2, "fsdp": 2, "tensor": 2}
EVERY_STAGE = P(tuple(STAGES))


@pytest.fixture
def on_stages():
    """A placement on a mesh with stages, and what runs a function on it."""
    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:8], (2, 2, 2)), tuple(STAGES))
    return place_params(Parallelism(mesh), PARAMS, DECLARED), partial(on_devices, **STAGES)


def test_params_of_no_layer_are_gathered_over_stages_too(on_stages):
    placement, run_on_stages = on_stages
    assert placement.specs["kernel"] == P(("fsdp", "pipe"), "tensor")

    def gather(params):
        whole = transfers.gather_params(placement, params, [])
        return {"kernel": whole["kernel"], "other": whole["other"][None], "bias": whole["bias"][None]}

    out = {"kernel": P(None, "tensor"), "other": EVERY_STAGE, "bias": EVERY_STAGE}
    found = run_on_stages(gather, PARAMS, in_specs=(placement.specs,), out_specs=out)
    np.testing.assert_array_equal(found["kernel"], PARAMS["kernel"])
    for device in range(8):
        np.testing.assert_array_equal(found["other"][device], PARAMS["other"].astype(jnp.bfloat16))


def test_gradients_of_no_layer_are_summed_over_stages_too(on_stages):
    """Each stage has the gradient of some of the microbatches."""
    placement, run_on_stages = on_stages
    each = {"kernel": gradients_of_each((32, 24)), "bias": gradients_of_each((16,))}
    params, specs = ({name: tree[name] for name in each} for tree in (PARAMS, placement.specs))
    placement = Placement(placement.parallel, {name: placement.places[name] for name in each})

    def reduce(gradients, params):
        return transfers.reduce_gradients(placement, jax.tree.map(lambda x: x[0], gradients), params)

    found = run_on_stages(reduce, each, params, in_specs=(EVERY_STAGE, specs), out_specs=specs)
    of_tensor = {name: array.reshape(4, 2, *array.shape[1:]).sum(axis=0) for name, array in each.items()}
    np.testing.assert_allclose(found["kernel"], np.concatenate(list(of_tensor["kernel"]), axis=1), 1e-5, 1e-5)
    np.testing.assert_allclose(found["bias"], of_tensor["bias"].mean(axis=0), 1e-5, 1e-5)


@pytest.mark.parametrize("gradient_dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_gradients_in_16_bits_of_float32_params_are_summed_in_float32(gradient_dtype):
    """256 + 1 + 1 + 1, which bfloat16 cannot hold."""
    places = {"kernel": ParamPlace((4, 4))}
    placement = Placement(Parallelism(MESH, gradient_dtype=gradient_dtype), places)
    of_each = jnp.repeat(jnp.array([256, 1, 1, 1], jnp.bfloat16), 2).reshape(8, 1, 1) * jnp.ones(
        (8, 4, 4), jnp.bfloat16
    )

    def reduce(gradient, param):
        return transfers.reduce_gradients(placement, {"kernel": gradient[0]}, {"kernel": param})["kernel"]

    found = run(reduce, of_each, jnp.zeros((4, 4)), in_specs=(EVERY, P()), out_specs=P())
    assert found.dtype == jnp.float32 and bool(jnp.all(found == 259)) == (gradient_dtype is None)


@pytest.mark.parametrize("place", [ParamPlace((16,)), ParamPlace((16,), is_partial=True)], ids=["whole", "in parts"])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_param_of_all_devices_of_tensor_has_one_gradient(place, sequence):
    """Where each has computed all of it, their mean; where each has computed its rows or heads, their sum."""
    parallel = Parallelism(MESH, sequence_parallel=sequence)
    each = gradients_of_each((16,))
    reduce = partial(transfers.sum_of, parallel, place=place)
    found = run(lambda x: reduce(gradient=x[0])[None], each, in_specs=(EVERY,), out_specs=EVERY)
    assert all(jnp.array_equal(of_one, found[0]) for of_one in found)
    np.testing.assert_allclose(found[0], each.sum(axis=0) / (1 if sequence or place.is_partial else 2), 1e-5, 1e-5)


def test_amaxes_and_losses_are_those_of_all_devices():
    def of_all(x):
        share = jnp.sum(x) / 4  # the batch has four parts, each on two devices of `tensor`
        return transfers.whole_amaxes(HOW, jnp.abs(x)), transfers.whole_loss(HOW, share)

    amaxes, loss = run(of_all, jnp.arange(8.0) - 7, in_specs=(EVERY,), out_specs=(EVERY, P()))
    assert amaxes.tolist() == [7.0] * 8 and float(loss) == pytest.approx(-(7 + 5 + 3 + 1) / 4)


def test_amaxes_and_losses_are_those_of_all_stages():
    parallel = Parallelism(make_mesh(pipe=4, data=2))

    def of_all(x):
        return transfers.whole_amaxes(parallel, x), transfers.whole_loss(parallel, x[0])[None]

    every = P(("pipe", "data"))
    amaxes, loss = on_devices(of_all, jnp.arange(8.0), in_specs=every, out_specs=(every, every), pipe=4, data=2)
    assert amaxes.tolist() == [7.0] * 8 and loss.tolist() == [28.0] * 8


@pytest.mark.parametrize("device", [None, 0, 3])
def test_what_one_device_finds_all_know(device):
    parallel = Parallelism(make_mesh(data=2, tensor=2))
    found = on_devices(
        lambda flag: transfers.on_any_device(parallel, flag[0])[None],
        np.arange(4) == device, in_specs=P(("data", "tensor")), out_specs=P(("data", "tensor")), data=2, tensor=2,
    )  # fmt: skip
    assert found.tolist() == [device is not None] * 4
