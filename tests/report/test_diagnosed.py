"""Diagnosed steps as arrays, and how fewer columns keep their worst."""

import numpy as np
from run_logs import healthy

from jax_fp8.report.diagnosed import QUANTITIES, bins, gather, sample_of, worst


def test_rows_stand_in_program_order_and_columns_in_that_of_steps():
    log = healthy(layers=2, count=5)
    diagnosed = gather(sample_of(row) for row in reversed(log.diagnostics))
    np.testing.assert_array_equal(diagnosed.steps, [10, 20, 30, 40, 50])
    first = log.diagnostics[0]
    assert diagnosed.places == tuple((entry["layer"], entry["tensor"]) for entry in first["tensors"])
    assert diagnosed.layers == tuple(entry["layer"] for entry in first["gradients"])
    for name in QUANTITIES:
        expected = [[entry[name] for entry in row["tensors"]] for row in log.diagnostics]
        np.testing.assert_allclose(diagnosed.quantity(name), np.array(expected).T, rtol=1e-6)
    expected = [[entry["norm"] for entry in row["gradients"]] for row in log.diagnostics]
    np.testing.assert_allclose(diagnosed.norms, np.array(expected).T, rtol=1e-6)


def test_a_tensor_that_comes_later_has_no_values_before():
    log = healthy(layers=1, count=3)
    late = {"layer": "head", "tensor": "input", "amax": 2.0}
    log.diagnostics[1]["tensors"].insert(0, late)
    log.diagnostics[2]["tensors"].append(late)
    diagnosed = gather(map(sample_of, log.diagnostics))
    assert diagnosed.places[-1] == ("head", "input")
    np.testing.assert_array_equal(diagnosed.quantity("amax")[-1], [np.nan, 2, 2])
    np.testing.assert_allclose(
        diagnosed.quantity("amax")[0],
        [row["tensors"][i]["amax"] for row, i in zip(log.diagnostics, (0, 1, 0), strict=True)],
        rtol=1e-6,
    )


def test_null_is_unknown_and_what_is_not_finite_is_told_from_it():
    row = {
        "step": 3,
        "loss": None,
        "tensors": [
            {"layer": "a", "tensor": "input", "amax": None, "nonfinite": 0.5},
            {"layer": "a", "tensor": "kernel", "amax": None, "nonfinite": None},
        ],
        "gradients": [
            {"layer": "a", "norm": 1.0, "nonfinite": 2},
            {"layer": "b", "norm": None, "nonfinite": 0},
            {"layer": "c", "norm": None, "nonfinite": None},
            {"layer": "d", "norm": 1e300, "nonfinite": 0},
            {"layer": "e", "norm": 1.0, "nonfinite": 0},
        ],
    }
    diagnosed = gather([sample_of(row)])
    assert np.isnan(diagnosed.quantity("amax")).all() and np.isnan(diagnosed.losses).all()
    assert diagnosed.broken_tensors.ravel().tolist() == [True, False]
    assert diagnosed.broken_gradients.ravel().tolist() == [True, True, False, True, False]


def test_loads_are_multiples_of_the_mean():
    """Also where shares do not add up to 1, for they are the largest over microbatches."""
    shares = {
        "even": [0.25, 0.25, 0.25, 0.25],
        "uneven": [0.6, 0.6, 0.37, 0.03],
        "one": [1.0, 0.0, 0.0, 0.0],
        "unknown": [0.5, None, 0.25, 0.25],
        "none": [0.0, 0.0, 0.0, 0.0],
    }
    row = {"step": 1, "experts": [{"layer": name, "fractions": of} for name, of in shares.items()]}
    row["experts"][0] |= {"dropped": 0.125, "entropy": None}  # older files have neither
    later = {"step": 2, "experts": row["experts"][:1]}
    diagnosed = gather(map(sample_of, [later, row, {"step": 3}]))
    assert diagnosed.routers == tuple(shares)
    np.testing.assert_allclose(diagnosed.load("busiest")[:, 0], [1, 1.5, 4, np.nan, np.nan])
    np.testing.assert_allclose(diagnosed.load("idlest")[:, 0], [1, 0.075, 0, np.nan, np.nan], rtol=1e-6)
    np.testing.assert_allclose(diagnosed.load("unused")[:, 0], [0, 0, 0.75, np.nan, np.nan])
    np.testing.assert_allclose(diagnosed.load("busiest")[0], [1, 1, np.nan])
    np.testing.assert_allclose(diagnosed.load("dropped")[:, 0], [0.125, np.nan, np.nan, np.nan, np.nan])
    assert np.isnan(diagnosed.load("entropy")).all()


def test_bins_cover_all_columns():
    assert bins(5, 240).tolist() == [0, 1, 2, 3, 4]
    starts = bins(2000, 240)
    assert len(starts) == 240 and starts[0] == 0 and set(np.diff(starts)) <= {8, 9}


def test_a_bin_keeps_its_worst():
    """Wherever the one bad value among 2,000 is, its bin shows it; and no other does."""
    starts = bins(2000, 240)
    for column in (0, 7, 8, 1234, 1999):
        values = np.full((2, 2000), 0.01)
        values[1, column] = 0.9
        values[0, ::2] = np.nan
        shown = worst(values, starts, "saturated")
        home = np.searchsorted(starts, column, side="right") - 1
        assert shown.shape == (2, 240) and np.flatnonzero(shown[1] > 0.5).tolist() == [home]
        np.testing.assert_array_equal(shown[0], np.full(240, 0.01))


def test_the_worst_headroom_is_the_least_below_1_or_else_the_largest():
    starts = np.array([0, 3])
    values = np.array([[1.0, 0.5, 300.0, 1.1, 200.0, 2.0], [np.nan, np.nan, np.nan, np.nan, 3.0, np.nan]])
    np.testing.assert_array_equal(worst(values, starts, "headroom"), [[0.5, 200], [np.nan, 3]])
