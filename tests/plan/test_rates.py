"""Rates of a GPU: those that come with its description, a file of one's own, and what is no such file."""

import dataclasses
import json
import os

import pytest

from jax_fp8.plan.described import GPUS
from jax_fp8.plan.rates import Rates, RateTable, rate_at, rates_of


@pytest.mark.parametrize("gpu", GPUS)
def test_every_described_gpu_has_rates_and_says_where_they_come_from(gpu):
    table = RateTable.for_gpu(gpu)
    assert table.rates == rates_of(gpu) and list(table.sources) == [field.name for field in dataclasses.fields(Rates)]
    assert all(table.sources.values())
    assert table.sources["between_hosts"].startswith("not measured")


def test_a_file_has_what_was_measured_and_keeps_the_rest(tmp_path):
    table = RateTable.for_gpu("h200")
    renewed = table.renewed("NVIDIA H100", "tune, today", memory=3e12, fp8=((1e9, 1e14), (1e12, 1e15)))
    renewed.save(path := tmp_path / "folder" / "rates.json")
    found = RateTable.load(path)
    assert found == renewed and found.gpu == "NVIDIA H100"
    assert (found.rates.memory, found.rates.wire) == (3e12, table.rates.wire)
    assert (found.sources["memory"], found.sources["wire"]) == ("tune, today", table.sources["wire"])


@pytest.mark.parametrize(("operations", "rate"), [(1.0, 2.0), (10.0, 2.0), (100.0, 3.0), (1000.0, 4.0), (5000.0, 4.0)])
def test_the_rate_of_a_size_lies_between_those_that_were_measured(operations, rate):
    assert rate_at(((10.0, 2.0), (1000.0, 4.0)), operations) == pytest.approx(rate)
    assert rate_at(((10.0, 2.0),), operations) == 2.0


WRONG = {
    "no number": {"memory": "fast"},
    "zero": {"wire": 0},
    "negative": {"launch": -1e-6},
    "NaN": {"beside": float("nan")},
    "no curve": {"fp8": 1e15},
    "empty": {"bf16": []},
    "falling sizes": {"fp8": [[1e12, 1e15], [1e11, 1e15]]},
    "a rate of zero": {"fp8_split": [[1e12, 0]]},
    "more than a float holds": {"wire": 10**400},
    "true": {"memory": True},
    "infinite": {"memory": float("inf")},
    "a size that is a text": {"fp8": [["1e12", 1e15], [1e13, 1e15]]},
    "sizes that are lists": {"fp8": [[[1], 1e15], [[2], 1e15]]},
    "three of a pair": {"fp8": [[1e12, 1e15, 1]]},
    "an object": {"fp8": {"1e12": 1e15}},
}


OTHERS = {
    "a list of rates": lambda content: content | {"rates": [content["rates"]]},
    "a gpu that is a list": lambda content: content | {"gpu": ["h200"]},
    "a rate that is a number": lambda content: content | {"rates": content["rates"] | {"wire": 1e9}},
    "a source that is a number": lambda content: content | {
        "rates": content["rates"] | {"wire": {"value": 1, "from": 3}}
    },
}  # fmt: skip


@pytest.mark.parametrize("case", [*WRONG, *OTHERS, "a missing one", "no JSON", "a list", "no file", "a pipe"])
def test_what_is_no_file_of_rates_is_one_sentence(case, tmp_path):
    RateTable.for_gpu("h200").save(path := tmp_path / "rates.json")
    content = json.loads(path.read_text())
    for name, value in WRONG.get(case, {}).items():
        content["rates"][name]["value"] = value
    if case == "a missing one":
        del content["rates"]["attention"]
    content = OTHERS.get(case, lambda content: content)(content)
    path.write_text({"no JSON": "{", "a list": "[]"}.get(case, json.dumps(content)))
    if case in ("no file", "a pipe"):
        path.unlink()
    if case == "a pipe":
        os.mkfifo(path)
    with pytest.raises(ValueError, match="rates must be a file that `python -m jax_fp8 tune --rates` wrote") as error:
        RateTable.load(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_what_is_no_place_for_rates(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"rates must be written to .*folder, got Is a directory; choose another path"):
        RateTable.for_gpu("h200").save(tmp_path / "folder")


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ValueError, match=r"gpu must be one of h200, got 'b9000'; choose one of these"):
        rates_of("b9000")
