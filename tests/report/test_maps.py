"""Maps: what page.js gets to draw, read back as it does."""

import base64
import time

import numpy as np
import pytest
from run_logs import freeze, healthy, with_experts

from jax_fp8.report.diagnosed import LOADS, QUANTITIES, Diagnosed, gather, sample_of
from jax_fp8.report.maps import COLUMNS, encode, gradient_map, load_map, tensor_map


def decode(text: str) -> np.ndarray:
    """As page.js does it: three bytes are the upper ones of a float32."""
    upper = np.frombuffer(base64.b64decode(text), np.uint8).reshape(-1, 3)
    return np.pad(upper, ((0, 0), (0, 1))).copy().view(">f4").ravel()


@pytest.mark.parametrize("value", [0.0, 1.0, 448.0, 0.026, 2e-6, -3.5e-9, 1.7e30, np.nan])
def test_values_keep_four_digits(value):
    np.testing.assert_allclose(decode(encode(np.array([[value]]))), [value], rtol=2e-5)


def test_values_beyond_float32_are_the_largest():
    assert decode(encode(np.array([1e300, -1e300, 0.0]))).tolist() == [np.inf, -np.inf, 0.0]


def test_a_map_has_rows_columns_and_exact_values():
    log = healthy(layers=2, count=12)
    log.tensor(5, "h_1/mlp/down", "output_gradient").update(amax=None, nonfinite=0.25)
    diagnosed = gather(map(sample_of, log.diagnostics))
    drawn = tensor_map(diagnosed)
    assert drawn["rows"][:3] == [
        ["h_0/attention/query+key+value", name] for name in ("input", "kernel", "output gradient")
    ]
    assert drawn["columns"] == [[step, step] for step in range(10, 130, 10)]
    assert drawn["broken"] == [23 * 12 + 5]
    assert {*drawn["values"]} == {*QUANTITIES, "overall"}
    for name in QUANTITIES:
        np.testing.assert_allclose(decode(drawn["values"][name]), diagnosed.quantity(name).ravel(), rtol=2e-5)


def test_a_map_of_loads_keeps_the_busiest_and_the_idlest_of_a_bin():
    log = with_experts(healthy(count=2000))
    log.diagnostics[1234]["experts"][1] |= {"fractions": [0.7, 0.1, 0.2, 0.0], "dropped": 0.3, "entropy": 0.05}
    drawn = load_map(gather(map(sample_of, log.diagnostics)))
    assert drawn["rows"] == [["h_0/mlp", ""], ["h_1/mlp", ""]] and len(drawn["columns"]) == COLUMNS
    found = {name: decode(drawn["values"][name]).reshape(2, -1) for name in LOADS}
    column = next(i for i, (first, last) in enumerate(drawn["columns"]) if first <= 12_350 <= last)
    np.testing.assert_allclose([found[name][1, column] for name in LOADS], [2.8, 0, 0.25, 0.3, 0.05], rtol=1e-4)
    assert np.delete(found["busiest"], column, axis=1).max() < 1.5 and found["unused"][0].max() == 0
    assert not drawn["quiet"] and load_map(gather(map(sample_of, with_experts(healthy()).diagnostics)))["quiet"]


def test_every_scale_has_a_color_and_a_label_for_each_class():
    diagnosed = gather(map(sample_of, with_experts(healthy(count=12)).diagnostics))
    for drawn in (tensor_map(diagnosed), gradient_map(diagnosed), load_map(diagnosed)):
        for scale in drawn["scales"]:
            assert len(scale["colors"]) == len(scale["labels"]) == len(scale["bounds"]) + 1
            assert list(scale["bounds"]) == sorted(set(scale["bounds"])) and scale["name"] in drawn["values"]


def test_a_frozen_scale_and_a_healthy_tensor_have_other_colors():
    log = healthy(count=40)
    freeze(log, "h_1/mlp/down", "input", 12)
    drawn = tensor_map(gather(map(sample_of, log.diagnostics)))
    scale = next(scale for scale in drawn["scales"] if scale["name"] == "overall")
    classes = np.digitize(decode(drawn["values"]["overall"]), scale["bounds"]).reshape(-1, 40)
    row = drawn["rows"].index(["h_1/mlp/down", "input"])
    assert classes[row, -1] >= 4 and classes[row, 5] == 0 and np.delete(classes, row, axis=0).max() == 0


def test_gradients_that_jump_and_that_are_not_finite():
    log = healthy(count=40)
    log.gradient(30, "h_1/mlp/down")["norm"] = 20.0
    log.gradient(35, "h_0/mlp/down").update(norm=None, nonfinite=3)
    drawn = gradient_map(gather(map(sample_of, log.diagnostics)))
    ratios, counts = (decode(drawn["values"][name]).reshape(-1, 40) for name in ("ratio", "nonfinite"))
    row, broken = ([name for name, _ in drawn["rows"]].index(name) for name in ("h_1/mlp/down", "h_0/mlp/down"))
    assert 30 < ratios[row, 30] < 300 and np.nanmax(np.delete(ratios, row, axis=0)) < 10
    assert drawn["broken"] == [broken * 40 + 35] and counts[broken, 35] == 3


def large(layers: int, count: int) -> Diagnosed:
    """Arrays as of a long run of a deep model."""
    generator = np.random.default_rng(0)
    names = tuple(f"h_{layer}/{gemm}" for layer in range(layers) for gemm in ("qkv", "out", "up", "down"))
    places = tuple((name, tensor) for name in names for tensor in ("input", "kernel", "output_gradient"))
    values = generator.random((len(QUANTITIES), len(places), count), np.float32)
    norms = generator.random((len(names), count), np.float32)
    loads = np.zeros((len(LOADS), 0, count))
    return Diagnosed(np.arange(count), np.ones(count), places, values, names, norms, np.zeros_like(norms), (), loads)


@pytest.mark.parametrize("layers", [24, 128])
def test_maps_of_a_long_run_are_small_and_soon_made(layers):
    diagnosed = large(layers, 2000)
    diagnosed.values[3, 7, 1111] = 5.0  # saturated, in one step of one tensor
    began = time.process_time()
    drawn = [tensor_map(diagnosed), gradient_map(diagnosed)]
    assert time.process_time() - began < 5
    assert sum(len(text) for one in drawn for text in one["values"].values()) < 3e6
    columns = drawn[0]["columns"]
    assert len(columns) <= COLUMNS and columns[0][0] == 0 and columns[-1][1] == 1999
    saturated = decode(drawn[0]["values"]["saturated"]).reshape(-1, len(columns))
    (row,), (column,) = np.nonzero(saturated > 1)
    assert row == 7 and columns[column][0] <= 1111 <= columns[column][1]
