"""The benchmark of activations on the host: it runs end to end, and what it compares can also differ."""

import json

import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8


@pytest.mark.slow
def test_offload_runs_whole(benchmark, tmp_path):
    offload = benchmark("offload")
    assert offload.main(["--self-test", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "offload.json").read_text())
    found = [(row["job"]["part"], row["job"]["remat"]) for row in rows]
    bits = [(offload.BITS, remat) for remat in ("full", "offload:2")]
    assert found == [*bits, (offload.TIMED, "none"), (offload.LARGE, "offload:1")]
    full, on_host, _, _ = rows
    assert on_host["checksums"] == full["checksums"] and full["moved_bytes"] == 0 < on_host["moved_bytes"]
    arrays = len(full["checksums"])
    assert arrays > 20 and f"| `offload:2` | yes | 0 of {arrays} |" in (tmp_path / "offload.md").read_text()


def test_checksums_tell_bits_apart(benchmark):
    offload = benchmark("offload")
    params = {"a": jnp.float32([0, -1.5]), "b": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "n": jnp.int32(3)}

    def checksums(**params):
        return offload.checksums(
            fp8.TrainState(jnp.int32(0), params, {"empty": jnp.ones(0)}, {"embedding": jnp.ones(2)})
        )

    same = checksums(**params)
    assert list(same) == ["[0]['a']", "[0]['b']", "[0]['n']"]
    assert checksums(**{**params, "a": jnp.float32([0, -1.5])}) == same
    changed = [{"a": jnp.float32([-0.0, -1.5])}, {"a": jnp.float32([-1.5, 0])}]
    for change in [*changed, {"b": params["b"].at[1, 2].set(5.03125)}]:
        other = checksums(**{**params, **change})
        assert [path for path in same if other[path] != same[path]] == [f"[0]['{next(iter(change))}']"]


def test_bytes_that_go_to_the_host_are_counted(benchmark):
    def there_and_back(x):
        return jax.device_put(jax.device_put(x, jax.memory.Space.Host), jax.memory.Space.Device)

    jaxpr = jax.make_jaxpr(jax.jit(lambda x: there_and_back(x) + x))(jnp.ones((4, 8), jnp.bfloat16)).jaxpr
    assert benchmark("offload").moved_bytes(jaxpr) == 4 * 8 * 2


def test_what_has_no_room_is_a_row_that_says_so(benchmark):
    offload = benchmark("offload")
    options = offload.parse(["--layers", "4", "--large-remat", "none", "offload:2", "--check-layers", "2"])
    figures = {"step_ms": 2.0, "tokens_per_s": 9.0, "peak_bytes": 6 * offload.GIB, "moved_bytes": 0, "host_bytes": 0}
    figures |= {"first_loss": 2.0, "last_loss": 1.0, "environment": offload.tables.environment()}
    figures["checksums"] = {"kernel": 7, "bias": 8}
    rows = [figures | {"losses": [], "job": vars(job)} for job in offload.jobs_of(options)]
    by_case = {(row["job"]["part"], row["job"]["remat"]): row for row in rows}
    by_case[offload.TIMED, "offload:1"].update(peak_bytes=4 * offload.GIB, step_ms=3.0)
    by_case[offload.BITS, "norms"]["checksums"] = {"kernel": 7, "bias": 9}
    by_case[offload.BITS, "full"]["losses"] = ["0x0p+0"]
    by_case[offload.LARGE, "none"]["failed"] = f"jax.errors.JaxRuntimeError: {offload.NO_ROOM}: out of memory"
    page = offload.markdown(rows, options)
    assert "| `none` | does not fit |" in page and all(offload.is_good(row) for row in rows)
    assert "| `offload:1` | 3 | 1.5 | 9 | 4 | 2 |" in page
    assert page.count("| yes | 0 of 2 |") == 4
    assert "| `norms` | yes | 1 of 2 |" in page and "| `full` | no | 0 of 2 |" in page
    by_case[offload.LARGE, "offload:2"]["failed"] = by_case[offload.LARGE, "none"]["failed"]
    by_case[offload.TIMED, "full"]["failed"] = "ValueError: no"
    assert [row["job"]["remat"] for row in rows if not offload.is_good(row)] == ["full", "offload:2"]
