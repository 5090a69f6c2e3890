"""The index of an element in the whole leaf, on every shard of it; and numbers made of it that look random."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from reference import assert_same_bits

from jax_fp8.kernels.draws import PLACE_WORDS, Index, Place, _divisor, check_dims, draws_of, index_of, place_words

# The whole shape, and how many shards of each dim.
LEAVES = {
    "vector": ((24,), (4,)),
    "rows": ((8, 6), (4, 1)),
    "columns": ((8, 6), (1, 3)),
    "rows and columns": ((8, 6), (2, 3)),
    "the middle": ((4, 6, 5), (1, 3, 1)),
    "all three": ((4, 6, 10), (2, 3, 5)),
    "two of four": ((2, 6, 3, 8), (1, 3, 1, 2)),
    "beyond 2**32": ((2**26, 2**8), (2**24, 2**4)),
    "beyond 2**32, in the middle": ((2**3, 2**25, 2**8), (1, 2**22, 2**4)),
}


def shards(name):
    """The shape of a shard, and some shards: each with the index of its elements, in NumPy's 64 bits."""
    whole, counts = LEAVES[name]
    shape = tuple(size // count for size, count in zip(whole, counts, strict=True))
    places = list(np.ndindex(*counts)) if prod(counts) < 100 else [[count // 3 for count in counts], [0] * len(counts)]
    places.append([count - 1 for count in counts])
    for at in places:
        first = [number * size for number, size in zip(at, shape, strict=True)]
        coordinates = np.meshgrid(
            *(np.arange(size, dtype=np.uint64) + np.uint64(start) for size, start in zip(shape, first, strict=True)),
            indexing="ij",
        )
        index = np.zeros(shape, np.uint64)
        for coordinate, size in zip(coordinates, whole, strict=True):
            index = index * np.uint64(size) + coordinate
        yield shape, Place(tuple(map(np.uint32, first)), whole), index


@pytest.mark.parametrize("name", LEAVES)
def test_index_on_shards(name):
    for shape, place, expected in shards(name):
        low, high = jax.jit(index_of)(jnp.zeros(shape), place)
        assert_same_bits(np.asarray(low).astype(np.uint64) + (np.asarray(high).astype(np.uint64) << 32), expected)


@pytest.mark.parametrize("name", LEAVES)
def test_words_for_the_kernel_lead_to_the_same_index(name):
    for shape, place, expected in shards(name):
        words = np.asarray(place_words([shape, shape], [place, Place.of_all(shape)]))
        assert not words[1].any() and words.shape == (2, PLACE_WORDS)
        row = words[0].astype(object)
        local = range(prod(shape))
        index = [row[0] + (row[1] << 32) + at for at in local]
        for multiplier, shift, low, high in (row[2:6], row[6:10]):
            index = [
                i + divided(at, multiplier, shift) * (low + (high << 32)) for i, at in zip(index, local, strict=True)
            ]
        assert index == expected.reshape(-1).tolist()


def divided(number, multiplier, shift):
    """What the kernel computes, in 32 bits."""
    product = multiplier * number >> 32
    return (product + ((number - product) % 2**32 >> min(shift, 1))) % 2**32 >> max(shift, 1) - 1


def test_divisors():
    random = np.random.default_rng(0)
    divisors = [*range(1, 40), *random.integers(1, 2**32, 200).tolist(), 2**31, 2**31 + 1, 2**32 - 1, 2**16]
    for divisor in divisors:
        numbers = [0, 1, divisor - 1, divisor, min(2 * divisor, 2**32 - 1), 2**32 - 1, *random.integers(0, 2**32, 20)]
        for number in map(int, numbers):
            assert divided(number, *_divisor(divisor)) == number // divisor


@pytest.mark.parametrize(
    ("shape", "whole", "message"),
    [
        ((2, 2, 2, 2), (4, 4, 4, 4), r"may split the first dim of a param and at most 2 others.*\(4, 4, 4, 4\)"),
        ((2**31, 4), (2**31, 8), r"fewer than 2\*\*32 elements, got shards of shape \(2147483648, 4\)"),
    ],
)
def test_shards_that_no_kernel_knows(shape, whole, message):
    with pytest.raises(ValueError, match=message):
        place_words([shape], [Place((np.uint32(0),) * len(shape), whole)])


def test_a_dim_of_more_than_a_word():
    check_dims((2**32 - 1, 2**32 - 1))
    with pytest.raises(
        ValueError, match=r"fewer than 2\*\*32 elements.*got shape \(4294967296,\); give it another dim"
    ):
        check_dims((2**32,))


def test_draws_are_numpys():
    index = np.concatenate([np.arange(1000), 2**32 + np.arange(-5, 5), 2**40 + np.arange(10)]).astype(np.uint64)
    words = Index(*(jnp.asarray(word, jnp.uint32) for word in (index % 2**32, index >> np.uint64(32))))
    for seed, leaf in [(0, 0), (1, 7), (2**32 - 1, 2**20)]:
        expected = reference.draws_at(index, seed, leaf)
        for draw, numbers in zip(draws_of(words, jnp.uint32(seed), leaf), expected, strict=True):
            assert_same_bits(draw, numbers)


def uniform(seed=0, leaf=0, high=0, count=2**17) -> list[np.ndarray]:
    words = Index(jnp.arange(count, dtype=jnp.uint32), jnp.uint32(high))
    return [np.asarray(draw) / 2.0**32 - 0.5 for draw in draws_of(words, jnp.uint32(seed), leaf)]


def test_draws_look_random():
    """Each is uniform, and none tells of the other, of its neighbour, of the next step, leaf, or 2**32 elements on."""
    first, second = uniform()
    pairs = {
        "the other": (first, second),
        "its neighbour": (first[1:], first[:-1]),
        "the other of its neighbour": (first[1:], second[:-1]),
        "the next step": (first, uniform(seed=1)[0]),
        "the other of the next step": (second, uniform(seed=1)[1]),
        "the next leaf": (first, uniform(leaf=1)[0]),
        "2**32 elements on": (first, uniform(high=1)[0]),
    }
    for a, b in pairs.values():
        for x in (a, b):
            counts = np.histogram(x, 64, (-0.5, 0.5))[0]
            assert np.abs(counts * 64 / x.size - 1).max() < 0.15
        standard_error = 1 / 12 / np.sqrt(a.size)
        for x, y in ((a, b), (a % 0.5 - 0.25, b), (a, b % 0.5 - 0.25), (np.abs(a) - 0.25, np.abs(b) - 0.25)):
            assert np.abs(np.mean(x * y)) < 5 * standard_error
    assert np.abs(np.mean(first * first)) > 5 / 12 / np.sqrt(first.size)  # the control
