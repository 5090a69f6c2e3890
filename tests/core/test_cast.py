"""A Cast is one array and a rule, and the rule is a value: what it is made of, what is refused, what jit sees of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import assert_same_bits

from jax_fp8.core.cast import Cast, CastRule
from jax_fp8.core.formats import E4M3, E5M2
from jax_fp8.core.scale import ScaleFormula

pytestmark = pytest.mark.versions

SCALES = np.float32([0.5, 2, 8])
CASTS = {
    "scale": lambda: Cast.with_scale(E4M3, 0.3),
    "row": lambda: Cast.with_row(E4M3, SCALES, 1),
    "amax": lambda: Cast.from_amax(E5M2, jnp.float32(7), ScaleFormula(margin=2)),
    "tile": lambda: Cast.by_tile(E4M3, (1, 128), ScaleFormula(power_2_scale=True)),
}
EVERY_CAST = pytest.mark.parametrize("make", CASTS.values(), ids=CASTS)


@dataclasses.dataclass(frozen=True)
class Times:
    """A formula of a test's own."""

    factor: float

    def __call__(self, amax, dtype):
        return amax * self.factor


def test_with_a_scale():
    cast = Cast.with_scale(E4M3, 0.3)
    assert_same_bits(cast.source, np.float32(0.3))
    assert cast.rule == CastRule(jnp.dtype(E4M3), row=0, formula=None, tile=None)
    assert_same_bits(cast.rule.scale(cast.source), np.float32(0.3))


def test_with_a_row_of_scales():
    cast = Cast.with_row(E5M2, SCALES, 2)
    assert_same_bits(cast.source, SCALES)
    assert cast.rule == CastRule(jnp.dtype(E5M2), row=2)
    assert_same_bits(cast.rule.scale(cast.source[cast.rule.row]), np.float32(8))


def test_from_an_amax():
    cast = Cast.from_amax(E4M3, 448 * 4, ScaleFormula(margin=1))
    assert_same_bits(cast.source, np.float32(448 * 4))
    assert cast.rule == CastRule(jnp.dtype(E4M3), formula=ScaleFormula(margin=1))
    assert cast.rule.scale(cast.source) == 8


def test_by_tile():
    cast = Cast.by_tile(E4M3, (1, 128), ScaleFormula())
    assert cast.rule == CastRule(jnp.dtype(E4M3), formula=ScaleFormula(), tile=(1, 128), columnwise_tile=(1, 128))
    assert Cast.by_tile(E4M3, (1, 128), ScaleFormula(), (8, 8)).rule == dataclasses.replace(
        cast.rule, columnwise_tile=(8, 8)
    )
    assert_same_bits(cast.rule.scale(jnp.full((2, 3), 448.0)), np.ones((2, 3), np.float32))
    assert (cast.source.shape, cast.source.dtype) == ((), jnp.float32)  # nothing that XLA would have to be told of


def test_a_formula_may_be_anybodys():
    cast = Cast.from_amax(E4M3, 3, Times(0.5))
    assert cast.rule.scale(cast.source) == 1.5
    assert Cast.by_tile(E4M3, (1, 16), Times(2)).rule.scale(jnp.float32(3)) == 6


@EVERY_CAST
def test_a_rule_is_a_value(make):
    """jit compares rules: two that say the same are one program."""
    rule, again = make().rule, make().rule
    assert rule is not again and rule == again and hash(rule) == hash(again)
    assert jax.tree.structure(make()) == jax.tree.structure(make())


def test_rules_that_differ_are_not_equal():
    rules = [make().rule for make in CASTS.values()]
    rules += [
        Cast.with_scale(E5M2, 0.3).rule,
        Cast.with_row(E4M3, SCALES, 2).rule,
        Cast.from_amax(E5M2, 7, ScaleFormula()).rule,
        Cast.by_tile(E4M3, (128, 128), ScaleFormula(power_2_scale=True)).rule,
        Cast.from_amax(E5M2, 7, Times(0.5)).rule,
        Cast.from_amax(E5M2, 7, Times(0.25)).rule,
    ]
    assert len(set(rules)) == len(rules)


def test_a_dtype_is_the_same_however_it_is_named():
    assert Cast.with_scale(np.dtype(E4M3), 1).rule == Cast.with_scale("float8_e4m3fn", 1).rule


@EVERY_CAST
def test_the_source_is_the_only_leaf(make):
    cast = make()
    (leaf,), treedef = jax.tree.flatten(cast)
    assert leaf is cast.source
    assert treedef.unflatten([leaf]) == cast


def test_jit_traces_a_rule_once_and_another_source_not_again():
    traced = []

    @jax.jit
    def scale(cast):
        traced.append(cast.rule)
        return cast.rule.scale(cast.source)

    assert scale(Cast.from_amax(E4M3, 448, ScaleFormula())) == 1
    assert scale(Cast.from_amax(E4M3, 896, ScaleFormula())) == 2
    assert len(traced) == 1
    assert scale(Cast.from_amax(E4M3, 896, ScaleFormula(margin=1))) == 4
    assert len(traced) == 2


@pytest.mark.parametrize("name", ["scale", "row", "amax"])
def test_again_is_with_the_scale_that_was_used(name):
    cast = CASTS[name]()
    again = cast.again(jnp.float32(0.7))
    assert_same_bits(again.source, np.float32(0.7))
    assert again.rule == CastRule(cast.rule.dtype)


def test_again_by_tile_is_the_same_cast():
    cast = CASTS["tile"]()
    assert cast.again(jnp.ones((4, 2))) is cast


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Cast.with_scale(E4M3, jnp.ones(2)),
            r"scale must be a scalar, got shape \(2,\); quantize with one scale per tensor",
        ),
        (lambda: CASTS["scale"]().again(jnp.ones((1, 2))), r"scale must be a scalar, got shape \(1, 2\)"),
        (
            lambda: Cast.with_row(E4M3, jnp.ones(3), 3),
            r"must be one of a vector f32\[r\], got row 3 of shape \(3,\); pass a vector of scales and a row of it",
        ),
        (lambda: Cast.with_row(E4M3, jnp.ones(3), -1), r"got row -1 of shape \(3,\)"),
        (lambda: Cast.with_row(E4M3, jnp.ones((2, 3)), 0), r"got row 0 of shape \(2, 3\)"),
        (lambda: Cast.with_row(E4M3, jnp.float32(1), 0), r"got row 0 of shape \(\)"),
        (
            lambda: Cast.from_amax(E4M3, jnp.ones((2, 3)), ScaleFormula()),
            r"an amax must be a scalar, got shape \(2, 3\); pass that of the whole tensor",
        ),
        (lambda: Cast.by_tile(E4M3, (128,), ScaleFormula()), r"rows and columns, at least 1 each, got \(128,\)"),
        (lambda: Cast.by_tile(E4M3, (0, 128), ScaleFormula()), r"a tile must be a tuple .*, got \(0, 128\)"),
        (lambda: Cast.by_tile(E4M3, [1, 128], ScaleFormula()), r"a tile must be a tuple .*, got \[1, 128\]"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
