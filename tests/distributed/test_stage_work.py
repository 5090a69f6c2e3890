"""The units of work of a stage against the ordinary gradients of its layers, and one half of a backward after the other
against both at once."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import assert_close
from pipelines import CURRENT, DELAYED, SAME, WIDTH, layers, loss_of, variables_of
from reference import assert_same_bits

from jax_fp8.core.layered_loss import of_layer
from jax_fp8.core.paths import LayerPath, kernel_paths, map_with_names
from jax_fp8.core.recipe import Recipe
from jax_fp8.core.state import map_gemms_with_path
from jax_fp8.distributed import layer_work
from jax_fp8.distributed.stage_work import ChunkWork
from jax_fp8.grads.gradients import take_gradients, with_first_scales
from jax_fp8.grads.tape import Totals
from jax_fp8.ops.weights import cast_gemms

ROWS, MICROBATCHES = 64, 2
WEIGHT = 1 / 3
X = jax.random.normal(jax.random.key(1), (MICROBATCHES, ROWS, WIDTH), jnp.bfloat16)
DY = jax.random.normal(jax.random.key(2), X.shape, jnp.bfloat16)


class Chunk:
    """Layers, with scales of a first pass, and their units."""

    def __init__(self, recipe: Recipe | None, from_current=False, halves=True, **fields):
        self.from_current, self.halves = from_current, halves
        parts = layers(recipe, **fields)
        self.loss, self.variables = loss_of(parts), variables_of(parts)
        self.gemms: dict[LayerPath, Recipe] = {
            (name, gemm): recipe for name in parts for gemm in ("up", "down") if recipe is not None
        }
        if "fp8" in self.variables:
            amaxes = take_gradients(self.weighted, from_current=True)(self.variables, X[0], DY[0]).amaxes
            self.variables["fp8"] = with_first_scales(self.variables["fp8"], amaxes, recipe)

    def weighted(self, variables, x, dy) -> jax.Array:
        """A scalar, by which the gradient of what leaves the layers is `dy`."""
        for name in self.loss.layers:
            x = self.loss.layer(of_layer(variables, name), x, name)
        return jnp.sum(x.astype(jnp.float32) * dy.astype(jnp.float32))

    def ordinary(self, variables):
        """The gradients of all microbatches by x, added up of params, and the largest amaxes."""

        def of_one(x, dy):
            def loss(given):
                params = dict(given["params"])
                return self.weighted({**given, "params": params}, params.pop("x"), dy)

            given = {**variables, "params": {**variables["params"], "x": x}}
            found = take_gradients(loss, from_current=self.from_current)(given)
            return found.grads, found.amaxes

        found = [of_one(x, dy) for x, dy in zip(X, DY, strict=True)]
        dx = [gradients.pop("x") for gradients, _ in found]
        sums = jax.tree.map(lambda *of: sum(np.float32(WEIGHT) * one for one in of), *(each for each, _ in found))
        return dx, sums, jnp.max(jnp.stack([amaxes for _, amaxes in found]), 0)

    def work(self, variables) -> ChunkWork:
        """As a stage has it: weights in FP8, NaN in place of their kernels."""
        if self.gemms:
            scales = {} if self.from_current else variables.get("fp8", {})
            kernels = {kernel for gemm in self.gemms for kernel in kernel_paths(gemm)}
            params = map_with_names(
                lambda names, param: jnp.full_like(param, jnp.nan) if names in kernels else param, variables["params"]
            )
            cache = cast_gemms(variables["params"], scales, self.gemms)
            variables = {**variables, "params": params, "fp8_cache": cache}
        x = jax.ShapeDtypeStruct(X.shape[1:], X.dtype)
        return ChunkWork(self.loss, self.loss.layers, variables, self.gemms, WEIGHT, self.from_current, x)

    def by_units(self, variables):
        """The same by `backward`, and by the two halves, weight gradients last."""
        work = self.work(variables)
        kept = [work.forward(x)[1] for x in X]
        totals, dx = work.no_totals(), []
        for of_one, dy in zip(kept, DY, strict=True):
            of_x, totals = work.backward(of_one, dy, totals)
            dx.append(of_x)
        if not self.halves:
            return (dx, totals), None
        of_halves, dx_of_halves, left = work.no_totals(), [], []
        for of_one, dy in zip(kept, DY, strict=True):
            of_x, operands, of_halves = work.input_gradient(of_one, dy, of_halves)
            dx_of_halves.append(of_x)
            left.append(operands)
        for of_one, operands in zip(kept, left, strict=True):
            of_halves = work.weight_gradient(of_one, operands, of_halves)
        return (dx, totals), (dx_of_halves, of_halves)


def rows_of(totals: Totals, chunk: Chunk) -> np.ndarray:
    """Amaxes in the order of the state."""
    found = [np.zeros(0, np.float32)]
    map_gemms_with_path(lambda gemm, _: found.append(totals.amaxes[gemm][0]), chunk.variables.get("fp8", {}))
    return np.concatenate(found)


@functools.cache
def chunk_of(name: str) -> Chunk:
    recipe, fields = CASES[name]
    return Chunk(recipe, **fields)


@functools.cache
def units_of(name: str):
    chunk = chunk_of(name)
    return jax.jit(chunk.by_units)(chunk.variables)


def assert_is_ordinary(name: str, dx, totals) -> None:
    chunk = chunk_of(name)
    wanted_dx, wanted, amaxes = jax.jit(chunk.ordinary)(chunk.variables)
    jax.tree.map(assert_same_bits, dx, wanted_dx)
    assert_close(totals.sums, wanted, SAME)
    assert_same_bits(rows_of(totals, chunk), amaxes)


CASES = {
    "delayed": (DELAYED, {}),
    "delayed, a first pass": (DELAYED, {"from_current": True, "count": 1}),
    "current": (CURRENT, {"count": 1}),
    "bfloat16": (None, {"count": 1}),
    "delayed, a GEMM in a jax.checkpoint": (DELAYED, {"remat": True, "halves": False, "count": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_units_are_the_ordinary_gradients(name):
    assert_is_ordinary(name, *units_of(name)[0])


@pytest.mark.parametrize("name", [name for name, (_, fields) in CASES.items() if "halves" not in fields])
def test_both_halves_are_the_backward_bit_for_bit(name):
    whole, halves = units_of(name)
    jax.tree.map(assert_same_bits, halves, whole)


@pytest.mark.slow
def test_what_another_microbatch_has_kept_is_noticed(monkeypatch):
    """Negative control."""
    forward = ChunkWork.forward
    monkeypatch.setattr(ChunkWork, "forward", lambda work, x: forward(work, X[0]))
    chunk = chunk_of("delayed")
    (dx, totals), _ = jax.jit(lambda variables: chunk.by_units(variables))(chunk.variables)
    with pytest.raises(AssertionError):
        assert_is_ordinary("delayed", dx, totals)


def test_operands_the_wrong_way_round_are_noticed(monkeypatch):
    """Negative control: xᵀ of one weight gradient and dyᵀ of another, which have the same shapes."""
    read = layer_work._Operand.read
    monkeypatch.setattr(layer_work._Operand, "read", lambda operand, kept, others: read(operand, kept, others)[::-1])
    chunk = chunk_of("delayed")
    whole, halves = jax.jit(lambda variables: chunk.by_units(variables))(chunk.variables)
    with pytest.raises(AssertionError, match="elements differ"):
        jax.tree.map(assert_same_bits, halves, whole)


def kept_of(chunk: Chunk) -> tuple[list, list]:
    """The shapes of what a forward keeps, and of what an input gradient leaves."""
    work = chunk.work(chunk.variables)
    _, kept = jax.eval_shape(work.forward, X[0])
    _, operands, _ = jax.eval_shape(work.input_gradient, kept, DY[0], work.no_totals())
    return kept, operands


def test_what_lies_between_the_units():
    """Nothing of a weight, of which each microbatch would have one more; and of the operands only gradients, since what
    the forward has kept stays where it is.
    """
    chunk = Chunk(DELAYED, hidden=3 * WIDTH)
    kept, operands = kept_of(chunk)
    kernels = {(3 * WIDTH, WIDTH), (WIDTH, 3 * WIDTH)}
    assert kept and not kernels & {leaf.shape for leaf in kept}
    operands = jax.tree.leaves(operands)
    in_fp8 = [leaf.shape for leaf in operands if leaf.ndim == 2]
    assert sorted(in_fp8) == 2 * [(WIDTH, ROWS)] + 2 * [(3 * WIDTH, ROWS)]
    assert {leaf.dtype for leaf in operands if leaf.ndim == 2} == {jnp.float8_e5m2.dtype}
    assert Counter(leaf.shape for leaf in kept if leaf.dtype == jnp.float8_e4m3fn) == {
        (WIDTH, ROWS): 2, (3 * WIDTH, ROWS): 2,
    }  # fmt: skip
