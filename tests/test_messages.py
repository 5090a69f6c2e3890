"""Misuses of public functions that have no other place: each ends in one sentence that says what to do."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fp8 as fp8

pytestmark = pytest.mark.versions

RECIPE = fp8.DelayedScaling(amax_history_len=2)
MODULE = fp8.Dense(16, recipe=RECIPE)
X = jnp.ones((16, 16))
VARIABLES = MODULE.init(jax.random.key(0), X)
EIGHT = fp8.quantize(X, fp8.E4M3, 1.0)
COLLECTION = r'the collection "fp8" must be dicts that end in \{"scale", "amax_history"\}, got'
quantize, matmul = partial(fp8.quantize, X, fp8.E4M3), partial(fp8.matmul, EIGHT, EIGHT)

MISUSES = {
    "whole variables": (
        lambda: fp8.update_state(VARIABLES, RECIPE),
        rf'{COLLECTION} float32\[16\] at params/bias; pass variables\["fp8"\]',
    ),
    "params": (lambda: fp8.update_state(VARIABLES["params"], RECIPE), rf"{COLLECTION} float32\[16\] at bias; pass"),
    "no state": (lambda: fp8.update_state(None, RECIPE), f"{COLLECTION} None at its root; pass"),
    "swapped": (lambda: fp8.update_state(RECIPE, VARIABLES["fp8"]), r"recipe must be .*, got a dict with"),
    "a name": (lambda: fp8.update_state(VARIABLES["fp8"], "delayed"), "recipe must be .*, got 'delayed'"),
    "scale 0": (
        lambda: quantize(0),
        r"scale must be a finite number between 2\*\*-126 and 2\*\*126, got 0; pass amax /",
    ),
    "scale -1": (lambda: quantize(-1.0), "scale must be a finite number between .*, got -1.0; pass"),
    "scale nan": (lambda: quantize(float("nan")), "scale must be a finite number between .*, got nan"),
    "scale inf": (lambda: quantize(np.float32(np.inf)), "scale must be a finite number between .*, got inf"),
    "scale 1e-45": (lambda: quantize(1e-45), "scale must be a finite number between .*, got 1e-45"),
    "an array's scale 0": (lambda: quantize(jnp.float32(0)), "scale must be a finite number between .*, got 0.0"),
    "scale str": (lambda: quantize("x"), "scale must be a finite number between .*, got 'x'"),
    "scale of a program": (lambda: jax.jit(lambda x: fp8.quantize(x, fp8.E4M3, 0.0))(X), "scale must be .*, got 0.0"),
    "a name of a dtype": (lambda: fp8.quantize(X, "e4m3", 1.0), "dtype must be E4M3 or E5M2, got e4m3"),
    "dtype and scale": (lambda: fp8.quantize(X, 1.0, fp8.E4M3), "dtype must be E4M3 or E5M2, got 1.0"),
    "a list": (lambda: fp8.quantize([1.0], fp8.E4M3, 1.0), r"quantize needs an array, got a list; pass jnp.asarray"),
    "twice": (lambda: fp8.quantize(EIGHT, fp8.E4M3, 1.0), "quantize needs an array, got a Fp8Array float8_e4m3fn"),
    "arrays": (lambda: fp8.matmul(X, X), r"matmul needs Fp8Arrays, got float32\[16, 16\] for a; pass fp8.quantize\(x"),
    "an array": (lambda: fp8.matmul(EIGHT, X), r"matmul needs Fp8Arrays, got float32\[16, 16\] for b; pass"),
    "no FP8": (
        lambda: fp8.matmul(EIGHT, fp8.Fp8Array(X, jnp.float32(1))),
        "matmul needs Fp8Arrays, got a Fp8Array float32",
    ),
    "bias": (lambda: matmul(bias=jnp.ones(8)), r"matmul needs bias of shape \(16,\), got float32\[8\]; reshape or"),
    "c": (
        lambda: matmul(c=jnp.ones(16)),
        r"matmul needs c of shape \(16, 16\), got float32\[16\]; reshape or broadcast",
    ),
    "alpha": (lambda: matmul(alpha="x"), "alpha must be a finite number, got 'x'"),
    "traced alpha": (
        lambda: jax.jit(lambda s: matmul(alpha=s))(1.0),
        r"alpha must be .*, got float32\[\]; multiply the res",
    ),
    "columns": (lambda: matmul(columns=16), "columns must be the first and their number, got 16; pass a tuple"),
    "columns float": (
        lambda: matmul(columns=(0.0, 16.0)),
        "the first of columns must be an integer .*, got 0.0; pass 0",
    ),
    "result": (lambda: matmul(dtype="bf16"), "matmul writes bfloat16, float16 or float32, got dtype='bf16'"),
    "path of a table": (
        lambda: fp8.tuned_gemms("path"),
        r"needs a GemmTable or None, got 'path'; pass fp8.GemmTable.load",
    ),
    "a table's dict": (lambda: fp8.tuned_gemms({}), "tuned_gemms needs a GemmTable or None, got {}"),
    "explain a model": (
        lambda: fp8.explain(MODULE, X),
        "a function is traced .*, got a Dense; of a model pass model.apply",
    ),
    "explain variables": (lambda: fp8.explain(VARIABLES), "a function is traced with its arguments, got a dict"),
    "update's rows": (
        lambda: fp8.apply_updates({"w": X}, {"w": X[0]}),
        r"an update must be an array of the shape of its param, got float32\[16\] for float32\[16, 16\]",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    call, message = MISUSES[name]
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert len(str(raised.value)) < 200


def test_a_traced_scale_cannot_be_looked_at():
    jax.jit(lambda scale: fp8.quantize(X, fp8.E4M3, scale))(0.0)


GRADIENT = {"w": jnp.full((16, 16), 0.5)}


@pytest.mark.parametrize("jit", [False, True])
def test_optax_cannot_apply_the_updates_of_fp8_params(jit):
    """It added the new bytes to the old ones, and said nothing."""
    params, tx = {"w": EIGHT}, fp8.fused_adam(1e-2)
    updates, _ = (jax.jit(tx.update) if jit else tx.update)(GRADIENT, tx.init(params), params)
    for apply in (optax.apply_updates, jax.jit(optax.apply_updates)):
        with pytest.raises(
            ValueError, match=r"the update of an FP8 param takes its place, .*; use jax_fp8.apply_updates"
        ):
            apply(params, updates)
    numpys = {"w": fp8.Fp8Array(np.asarray(EIGHT.values), np.asarray(EIGHT.scale))}
    with pytest.raises(ValueError, match="takes its place"):
        optax.apply_updates(numpys, updates)


def test_the_update_of_an_fp8_param_reads_like_its_new_value():
    params, tx = {"w": EIGHT}, fp8.fused_adam(1e-2)
    updates, _ = jax.jit(tx.update)(GRADIENT, tx.init(params), params)
    update, new = updates["w"], fp8.apply_updates(params, updates)["w"]
    assert isinstance(update, fp8.Fp8Array) and isinstance(new.values, jax.Array)
    assert (update.shape, update.dtype, update.ndim, update.size) == (new.shape, new.dtype, 2, 256)
    for one, other in ((update, new), (update.values, new.values), (update.dequantize(), new.dequantize())):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    np.testing.assert_allclose(new.dequantize(), 0.99, rtol=0.07)
    assert jax.tree.structure(fp8.apply_updates(params, {"w": EIGHT})) == jax.tree.structure(params)
