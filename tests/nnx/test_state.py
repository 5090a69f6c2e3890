"""The state of an NNX model: where it is, what it is called, and how it is saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_layers import FEATURES, HIDDEN, RECIPE, X, assert_same, loss, make, staged, values

import jax_fp8 as fp8
import jax_fp8.nnx
from jax_fp8.core.fp8_gemm import Record
from jax_fp8.core.recorder import Recorder, Refs, listing
from jax_fp8.nnx.state import GemmState, attach, detach, gemms_of, write

pytestmark = pytest.mark.versions


class Model(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        options = {"recipe": RECIPE, "rngs": rngs}
        self.fp8 = nnx.List([make(), fp8.nnx.LayerNormMLP(FEATURES, HIDDEN, activation="swiglu", **options)])
        self.plain = fp8.nnx.Linear(FEATURES, FEATURES, recipe=None, rngs=rngs)
        self.current = fp8.nnx.Linear(FEATURES, FEATURES, recipe=fp8.CurrentScaling(), rngs=rngs)

    def __call__(self, x):
        for layer in self.fp8:
            x = layer(x)
        return self.current(self.plain(x))


def test_gemms_have_the_paths_of_their_layers():
    """Also where a user calls something else "fp8"."""
    gemms = gemms_of(Model())
    in_list = [("fp8", "0", "first"), ("fp8", "0", "second"), ("fp8", "1", "down"), ("fp8", "1", "gate+up")]
    assert sorted(gemms) == [("current",), *in_list]
    state = fp8.nnx.fp8_state(Model())
    assert sorted(state) == ["fp8"] and sorted(state["fp8"]["1"]) == ["down", "gate+up"]


def test_all_state_is_of_one_type_and_apart_from_params():
    model = Model()
    state = nnx.to_flat_state(nnx.state(model, fp8.nnx.Fp8State))
    assert {path[-1] for path, _ in state} == {"scale", "amax_history"} and len(state) == 8
    assert not any("amax" in str(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)))


def test_a_pure_dict_restores_a_model():
    """What Orbax is given and gives back, through NumPy and keys that are strings."""
    model = Model()
    fp8.nnx.value_and_grad(loss)(model, X)
    fp8.nnx.update_state(model)
    saved = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    saved["fp8"] = {str(number): layer for number, layer in saved["fp8"].items()}
    restored = Model(seed=1)
    assert np.any(values(restored)[0]["plain"]["kernel"] != saved["plain"]["kernel"])
    state = nnx.state(restored)
    nnx.replace_by_pure_dict(state, saved)
    nnx.update(restored, state)
    assert_same(values(restored), values(model))
    expected, _ = fp8.nnx.value_and_grad(loss)(model, X)
    assert fp8.nnx.value_and_grad(loss)(restored, X)[0] == expected
    assert_same(values(restored), values(model))


def test_update_state_is_that_of_a_collection_and_leaves_alone_what_did_not_run():
    model = Model()
    fp8.nnx.value_and_grad(lambda model, x: loss(model.fp8[0], x))(model, X)
    expected = fp8.update_state(fp8.nnx.fp8_state(model), RECIPE)
    before = fp8.nnx.fp8_state(model)["fp8"]["1"]
    nnx.jit(fp8.nnx.update_state)(model)
    assert_same(fp8.nnx.fp8_state(model), expected)
    assert_same(fp8.nnx.fp8_state(model)["fp8"]["1"], before)
    assert np.all(expected["fp8"]["0"]["first"]["amax_history"][:, -1] > 0)
    counted = fp8.count_amaxes(fp8.nnx.fp8_state(model), RECIPE)
    assert counted["nonfinite_amaxes"] == 0


def test_train_and_eval_say_whether_a_forward_stages():
    model = make()
    for change, stages in ((model.train, True), (model.eval, False)):
        change()
        nnx.update(model, nnx.state(make(), fp8.nnx.Fp8State))
        nnx.jit(lambda model, x: model(x))(model, X)
        found = staged(model)
        assert all(np.any(amaxes[:2]) == stages and amaxes[2] == 0 for amaxes in found.values())
    viewed = nnx.view(model, use_running_average=False)
    assert not viewed.first.fp8.use_running_average and model.first.fp8.use_running_average


def test_what_is_attached_is_found_and_goes_again():
    model = make()
    gemms = gemms_of(model)
    recorder = Recorder(Refs(record=Record(jax.new_ref(jnp.zeros(3)))))
    attach({**gemms}, {"first": {"recorder": recorder}})
    with listing() as found:
        model(X)
    assert list(found) == [("first",), ("second",)]
    assert recorder.record.amax_ref[0] > 0
    assert isinstance(model.first.fp8.recorder, fp8.nnx.Fp8State) and not hasattr(model.second.fp8, "recorder")
    detach(gemms)
    assert not hasattr(model.first.fp8, "recorder")


def test_a_part_of_a_state_is_written():
    model = make()
    new = {"second": {"scale": jnp.full(3, 2.0), "amax_history": jnp.ones((3, 4))}}
    write(gemms_of(model), new)
    assert_same(fp8.nnx.fp8_state(model)["second"], new["second"])
    assert model.first.fp8.scale[0] == 1


def test_stacked_kernels_have_stacked_states():
    kernels = jnp.arange(1, 4, dtype=jnp.float32)[:, None, None] * jnp.ones((3, 32, 16))
    state = GemmState(RECIPE, kernels)
    np.testing.assert_allclose(state.scale[:, 1], np.float32([1, 2, 3]) / 448, rtol=1e-6)
    assert state.amax_history.shape == (3, 3, 4)
    assert not hasattr(GemmState(fp8.CurrentScaling(), kernels), "scale")
