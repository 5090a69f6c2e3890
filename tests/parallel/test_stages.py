"""What moves between stages beside activations: each has its own layers, whole, and each device gets the gradients of
its shards of all layers; beside NumPy, on 4 and 8 devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import make_mesh, on_devices
from jax.sharding import PartitionSpec as P
from reference import amax, assert_same_bits, quantize, quantize_by_tile

from jax_fp8.core.cast import Cast
from jax_fp8.core.formats import E4M3
from jax_fp8.core.scale import ScaleFormula
from jax_fp8.core.shards import ParamSharding
from jax_fp8.kernels.quantize import quantize_transpose
from jax_fp8.parallel import stages
from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.parallel.placement import place_params
from jax_fp8.parallel.stages import Stages

MESHES = {
    "stages": {"pipe": 4},
    "data": {"pipe": 2, "data": 2},
    "tensor": {"pipe": 2, "tensor": 2},
    "fsdp": {"pipe": 2, "fsdp": 4},
    "all": {"pipe": 2, "fsdp": 2, "tensor": 2},
    "pipe last": {"data": 2, "fsdp": 2, "pipe": 2},
}
ALL = "all", "pipe last"  # have every axis between them, and stand for the others under a second jax
EACH_MESH = [
    pytest.param(axes, id=name, marks=pytest.mark.versions if name in ALL else ()) for name, axes in MESHES.items()
]
# Shape and sharding of each param of a layer; `odd` can be split by its columns alone, `whole` not at all.
PARAMS = {
    "columns": ((16, 24), ParamSharding(-1, 24)),
    "rows": ((16, 8), ParamSharding(-2, 16)),
    "narrow": ((16, 16), ParamSharding(dtype=jnp.bfloat16)),
    "odd": ((5, 16), ParamSharding()),
    "whole": ((3, 5), ParamSharding()),
    "heads": ((16, 6), ParamSharding(-1, 1, "heads", or_whole=True)),
    "bias": ((24,), ParamSharding(-1, 24)),
}


class Layers:
    """Two layers on each stage of a mesh, a chunk each: their params, and where these lie."""

    def __init__(self, axes, **options):
        self.axes, self.stages = axes, Stages(tuple(f"layer_{i}" for i in range(2 * axes["pipe"])), axes["pipe"], 2)
        rng = np.random.default_rng(0)
        self.params = {
            layer: {name: rng.normal(size=shape).astype(np.float32) for name, (shape, _) in PARAMS.items()}
            for layer in self.stages.layers
        }
        declared = {(layer, name): sharding for layer in self.stages.layers for name, (_, sharding) in PARAMS.items()}
        self.placement = place_params(Parallelism(make_mesh(**axes), **options), self.params, declared)
        self.places = self.placement.places["layer_0"]

    def devices(self):
        """The number of each device in a result, with its place on each axis."""
        for number, where in enumerate(np.ndindex(*self.axes.values())):
            yield number, {"fsdp": 0, "tensor": 0, "data": 0} | dict(zip(self.axes, where, strict=True))

    def part(self, whole, name, tensor):
        """What a device of `tensor` computes with."""
        dim = self.places[name].tensor_dim
        return whole if dim is None else np.split(whole, self.axes.get("tensor", 1), dim)[tensor]

    def run(self, function, *given, in_specs, out_specs):
        return on_devices(function, *given, in_specs=in_specs, out_specs=out_specs, **self.axes)

    @property
    def every(self):
        return P(tuple(self.axes))


def own_params(layers, chunk, order):
    """Of all devices the params of the layer of this chunk, from the shards of those of all stages in this order."""
    of_stages = [layers.stages.at(chunk, 0)[stage] for stage in order]

    def own(params):
        return {
            name: stages.own_param([params[layer][name] for layer in of_stages], place)[None]
            for name, place in layers.places.items()
        }

    return layers.run(own, layers.params, in_specs=(layers.placement.specs,), out_specs=layers.every)


def wrong_params(layers, chunk, found):
    """Which params of which devices are not those of the stage's own layer."""
    return {
        (number, name)
        for number, where in layers.devices()
        for name, place in layers.places.items()
        for own in [layers.params[layers.stages.at(chunk, 0)[where["pipe"]]][name]]
        if not np.array_equal(
            found[name][number], layers.part(own, name, where["tensor"]).astype(found[name].dtype), equal_nan=True
        )
    }


@pytest.mark.parametrize("axes", EACH_MESH)
def test_each_stage_has_the_params_of_its_own_layers(axes):
    layers = Layers(axes)
    for chunk in (0, 1):
        found = own_params(layers, chunk, range(axes["pipe"]))
        assert not wrong_params(layers, chunk, found)
        assert found["narrow"].dtype == jnp.bfloat16  # in the one dtype in which it is read
    assert {place.fsdp_dim for place in layers.places.values()} == {-2, -1, None}


@pytest.mark.versions
def test_another_order_of_stages_is_noticed():
    """Negative control: every param of every device."""
    layers = Layers(MESHES["all"])
    assert len(wrong_params(layers, 1, own_params(layers, 1, (1, 0)))) == 8 * len(PARAMS)
    assert len(wrong_params(layers, 0, own_params(layers, 1, (0, 1)))) == 8 * len(PARAMS)


def own_weights(layers, gemms, order):
    """Weights in FP8 of the second chunk, cast where they lie, each layer with a scale of its own; and these scales."""
    of_stages = [layers.stages.at(1, 0)[stage] for stage in order]
    scales = {layer: np.float32(0.01 * (1 + number)) for number, layer in enumerate(layers.stages.layers)}

    def own(params):
        parts = [
            [
                quantize_transpose(tuple(params[layer][name] for name in names), Cast.with_scale(E4M3, scales[layer]))
                for layer in of_stages
            ]
            for names in gemms
        ]
        found = stages.own_weights(parts, [[layers.places[name] for name in names] for names in gemms])
        return [jax.tree.map(lambda x: x[None], pair.arrays) for pair in found]

    return layers.run(own, layers.params, in_specs=(layers.placement.specs,), out_specs=layers.every), scales


GEMMS = [("columns",), ("rows",), ("narrow",), ("columns", "narrow"), ("whole",)]


def assert_own_weights(layers, found, scales):
    """Bits of both orientations; and the amax of what the devices of `pipe` have together."""
    for number, where in layers.devices():
        layer = layers.stages.at(1, 0)[where["pipe"]]
        for names, arrays in zip(GEMMS, found, strict=True):
            values, values_t, scale, found_amax = (array[number] for array in arrays)
            whole = [layers.part(layers.params[layer][name], name, where["tensor"]) for name in names]
            expected, _ = quantize(np.concatenate(whole, axis=1), E4M3, scales[layer])
            assert scale == scales[layer]
            assert_same_bits(values, expected)
            assert_same_bits(values_t, expected.T)
            is_split = layers.places[names[0]].fsdp_dim is not None
            parts = layers.axes.get("fsdp", 1) if is_split else 1
            own = [np.split(kernel, parts, axis=0)[where["fsdp"] if is_split else 0] for kernel in whole]
            assert found_amax == amax(np.concatenate(own, axis=1))


@pytest.mark.parametrize("axes", EACH_MESH)
def test_each_stage_has_the_weights_of_its_own_layers_in_fp8(axes):
    layers = Layers(axes)
    found, scales = own_weights(layers, GEMMS, range(axes["pipe"]))
    assert_own_weights(layers, found, scales)


def own_weights_by_tile(layers, order):
    """As `own_weights`, in squares of 2 x 2."""
    of_stages = [layers.stages.at(1, 0)[stage] for stage in order]
    cast = Cast.by_tile(E4M3, SQUARES, ScaleFormula())

    def own(params):
        parts = [[quantize_transpose(params[layer][name], cast) for layer in of_stages] for (name,) in OF_SQUARES]
        found = stages.own_weights(parts, [[layers.places[name] for name in names] for names in OF_SQUARES])
        return jax.tree.map(lambda x: x[None], found)

    return layers.run(own, layers.params, in_specs=(layers.placement.specs,), out_specs=layers.every)


SQUARES, OF_SQUARES = (2, 2), [("columns",), ("narrow",), ("whole",)]


def assert_own_squares(layers, found):
    for number, where in layers.devices():
        layer = layers.stages.at(1, 0)[where["pipe"]]
        for (name,), pair in zip(OF_SQUARES, found, strict=True):
            whole = layers.part(layers.params[layer][name], name, where["tensor"])
            values, scales = quantize_by_tile(whole, E4M3, SQUARES)
            assert_same_bits(pair.rowwise.values[number], values)
            assert_same_bits(pair.rowwise.scale[number], scales)
            assert_same_bits(pair.columnwise.values[number], values.T)
            assert_same_bits(pair.columnwise.scale[number], scales.T)


def test_each_stage_has_the_weights_of_its_own_layers_by_tile():
    layers = Layers(MESHES["all"])
    assert_own_squares(layers, own_weights_by_tile(layers, (0, 1)))
    with pytest.raises(AssertionError):
        assert_own_squares(layers, own_weights_by_tile(layers, (1, 0)))


@pytest.mark.versions
def test_weights_in_another_order_are_noticed():
    layers = Layers(MESHES["tensor"])
    found, scales = own_weights(layers, GEMMS, (1, 0))
    with pytest.raises(AssertionError):
        assert_own_weights(layers, found, scales)


@pytest.mark.versions
def test_without_gemms_in_fp8_there_are_no_weights():
    assert stages.own_weights([], []) == []


def gradients(layers, change=lambda gradient: gradient):
    """Of each param those of all shards, from a gradient of the stage's own layer that each device has; and these."""
    count = int(np.prod(list(layers.axes.values())))
    rng = np.random.default_rng(1)
    each = {
        name: rng.normal(size=(count, *place.shape_in_layer(layers.placement.parallel))).astype(np.float32)
        for name, place in layers.places.items()
    }

    def of_shards(each):
        return {
            name: stages.gradients_of_layers(layers.placement.parallel, change(each[name][0]), place)
            for name, place in layers.places.items()
        }

    specs = {name: (place.spec,) * layers.axes["pipe"] for name, place in layers.places.items()}
    return layers.run(of_shards, each, in_specs=(layers.every,), out_specs=specs), each


def sums(layers, name, each, stage):
    """The gradient of a param of this stage's layer, in NumPy: summed over the batch, its parts of `tensor` joined."""
    place, parallel = layers.places[name], layers.placement.parallel
    parts = [0] * layers.axes.get("tensor", 1)
    for number, where in layers.devices():
        if where["pipe"] == stage:
            parts[where["tensor"]] = parts[where["tensor"]] + each[number].astype(np.float64)
    if place.tensor_dim is not None:
        return np.concatenate(parts, place.tensor_dim)
    return sum(parts) / (1 if place.is_partial or parallel.sequence_parallel else len(parts))


@pytest.mark.versions
@pytest.mark.parametrize(
    ("axes", "sequence"),
    [*((axes, False) for axes in MESHES.values()), (MESHES["all"], True)],
    ids=[*MESHES, "all, sequence"],
)
def test_each_device_has_the_gradients_of_its_shards_of_all_layers(axes, sequence):
    layers = Layers(axes, sequence_parallel=sequence)
    found, each = gradients(layers)
    for name in PARAMS:
        for stage in range(axes["pipe"]):
            expected = sums(layers, name, each[name], stage)
            np.testing.assert_allclose(found[name][stage], expected, rtol=1e-5, atol=1e-5)
            other = sums(layers, name, each[name], (stage + 1) % axes["pipe"])  # negative control
            assert not np.allclose(found[name][stage], other, rtol=0.1, atol=0.1)


@pytest.mark.versions
def test_what_a_device_leaves_out_is_noticed():
    """Negative control: one device has no gradient."""
    layers = Layers(MESHES["all"])

    def without_last(gradient):
        is_last = sum(jax.lax.axis_index(axis) for axis in layers.axes) == 3
        return jnp.where(is_last, 0, gradient)

    found, each = gradients(layers, without_last)
    for name in PARAMS:
        assert not np.allclose(found[name][1], sums(layers, name, each[name], 1), rtol=0.1, atol=0.1)
        np.testing.assert_allclose(found[name][0], sums(layers, name, each[name], 0), rtol=1e-5, atol=1e-5)


@pytest.mark.versions
def test_layers_of_all_stages():
    of_two = Stages(tuple("abcdefgh"), 2, 2)
    assert of_two.chunk_size == 2
    assert [of_two.at(chunk, number) for chunk in (0, 1) for number in (0, 1)] == [
        ("a", "c"), ("b", "d"), ("e", "g"), ("f", "h"),
    ]  # fmt: skip
    assert Stages(("a", "b"), 2).at(0, 0) == ("a", "b")
    with pytest.raises(ValueError, match="got 3 layers for 2 stages with 1 chunks each; pass a multiple of 2 layers"):
        Stages(("a", "b", "c"), 2)
