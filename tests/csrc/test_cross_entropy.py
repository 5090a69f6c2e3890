"""csrc/cross_entropy.cu on the CPU, in place and not, against float64."""

import ml_dtypes
import numpy as np
import pytest
from combinations import every_pair, name_of
from emulation import EmulationError, InPlace, Input, Result, compile_for_cpu, planted
from losses import cross_entropy
from reference import assert_close, assert_same_bits

ENTRY = """
using namespace jax_fp8;

extern "C" int cross_entropy(void* logits, int64_t type, const int32_t* labels, const float* shares, double z_loss,
                             void* gradient, float* loss, float* lse, int64_t rows, int64_t vocab) {
  return launch_cross_entropy({logits, static_cast<SourceType>(type), labels, shares, static_cast<float>(z_loss),
                               gradient ? gradient : logits, loss, lse, rows, vocab}, nullptr);
}
"""
SOURCES = [np.float32, ml_dtypes.bfloat16, np.float16]  # in the order of SourceType
Z_LOSS = 0.03

# Shared memory for 64 elements of a row: then a cluster shares it, and without clusters the others are read again.
CAPACITY = "bytes / static_cast<int>(kVectorWidth * sizeof(T)) * kVectorWidth"
LITTLE_SHARED = (("cross_entropy.cu", CAPACITY, "64"),)
NO_CLUSTERS = (*LITTLE_SHARED, ("cross_entropy.cu", "&& found &&", "&& false &&"))


def array(seed, *shape, dtype=np.float32, size=2.0):
    return (size * np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def inputs(rows, vocab, dtype, size=2.0):
    random = np.random.default_rng(5)
    shares = random.random(rows).astype(np.float32)
    return array(1, rows, vocab, dtype=dtype, size=size), random.integers(0, vocab, rows).astype(np.int32), shares


def run(logits, labels, shares, z_loss=Z_LOSS, in_place=True, offset=0, changes=()):
    """Gradient, loss, lse; `offset` in bytes from where memory is aligned, of the logits and of the gradient."""
    rows, vocab = logits.shape
    row = Result((rows,), np.float32)
    ours, other = offset if isinstance(offset, tuple) else (offset, offset)
    to = (InPlace(logits), None) if in_place else (Input(logits, ours), Result(logits.shape, logits.dtype, other))
    return compile_for_cpu("cross_entropy.cu", ENTRY, changes).call(
        "cross_entropy",
        *(to[0], SOURCES.index(logits.dtype), labels, shares, float(z_loss), to[1], row, row, rows, vocab),
    )


def check(logits, labels, shares, got, z_loss=Z_LOSS):
    gradient, loss, lse = cross_entropy(logits, labels, shares, np.float32(z_loss))
    np.testing.assert_allclose(got[2], lse, rtol=5e-7, atol=5e-7)
    np.testing.assert_allclose(got[1], loss, rtol=2e-6, atol=2e-6)
    for row, wanted in zip(got[0], gradient, strict=True):
        assert_close(row, wanted, np.dtype(logits.dtype).name)
    if logits.dtype == np.float32:
        np.testing.assert_allclose(got[0], gradient, rtol=5e-6, atol=1e-7 * shares.max(initial=0))
    else:  # rounded once: the same bits but next to a tie, or where the label's terms cancel
        same = np.mean(got[0] == gradient.astype(logits.dtype)) if gradient.size else 1
        assert same > 0.99, f"{same:.4f} of the gradient are rounded as float64 would be"


# Fewer vectors than threads, more, more than a batch of loads; then vocabularies whose rows begin anywhere.
@pytest.mark.parametrize(
    ("shape", "source", "in_place"),
    every_pair(
        [(5, 16), (3, 4104), (2, 33000), (4, 1), (9, 3), (9, 77), (2, 1543), (3, 33001)], SOURCES, [True, False]
    ),
    ids=name_of,
)
def test_against_float64(shape, source, in_place):
    arguments = inputs(*shape, source)
    check(*arguments, run(*arguments, in_place=in_place))


@pytest.mark.parametrize("source", SOURCES[:2])
def test_what_shared_memory_does_not_hold(source):
    arguments = inputs(3, 4200, source)
    held = run(*arguments)
    check(*arguments, run(*arguments, changes=NO_CLUSTERS))
    for ours, other in zip(held, run(*arguments, changes=NO_CLUSTERS), strict=True):
        assert_same_bits(ours, other)


# Two, four and eight blocks that hold all of a row, and a row that even eight do not.
@pytest.mark.parametrize("source", SOURCES[:2])
@pytest.mark.parametrize("vocab", [120, 197, 256, 509, 4200, 4203])
def test_rows_that_a_cluster_shares(vocab, source):
    logits, labels, shares = inputs(9, vocab, source)
    labels[:4] = [0, vocab - 1, vocab // 2, 63]
    check(logits, labels, shares, run(logits, labels, shares, changes=LITTLE_SHARED))


# Three vectors a thread, and more than a batch; each of the two clusters has more rows than buffers.
@pytest.mark.parametrize("vocab", [8300, 8301, 33099])
def test_a_cluster_fetches_rows_ahead(vocab):
    capacity = (("cross_entropy.cu", CAPACITY, f"{(vocab // 16 + 1) * 8}"),)
    arguments = inputs(9, vocab, ml_dtypes.bfloat16)
    check(*arguments, run(*arguments, changes=capacity))


def test_a_cluster_reads_labels_of_more_rows_than_a_warp_has_lanes():
    arguments = inputs(70, 120, ml_dtypes.bfloat16)
    check(*arguments, run(*arguments, changes=LITTLE_SHARED))


def test_rows_that_are_longer_than_shared_memory():
    for source, vocab in ((np.float32, 70000), (ml_dtypes.bfloat16, 128256), (ml_dtypes.bfloat16, 128257)):
        arguments = inputs(2, vocab, source)
        check(*arguments, run(*arguments))


def test_large_logits():
    """A naive exponential overflows from 89 on; here a maximum rises from batch to batch, and from thread to thread."""
    for source in SOURCES:
        logits, labels, shares = inputs(2, 4104, source)
        logits = (logits.astype(np.float32) + np.linspace(-3e4, 3e4, 4104)).astype(source)
        check(logits, labels, shares, run(logits, labels, shares, z_loss=1e-6), z_loss=1e-6)


def test_no_rows_and_arrays_that_are_not_aligned():
    gradient, loss, lse = run(*inputs(0, 16, np.float32))
    assert (gradient.shape, loss.shape, lse.shape) == ((0, 16), (0,), (0,))
    for offset in (2, 8, (2, 4), (0, 2)):
        arguments = inputs(2, 48, ml_dtypes.bfloat16)
        check(*arguments, run(*arguments, in_place=False, offset=offset))


@pytest.mark.parametrize("shape", [(6, 48), (6, 7)])
def test_a_share_of_zero(shape):
    logits, labels, shares = inputs(*shape, ml_dtypes.bfloat16)
    shares[[0, 3]] = 0
    gradient, loss, _ = run(logits, labels, shares)
    assert not gradient[[0, 3]].any() and not loss[[0, 3]].any()
    assert gradient[[1, 2, 4, 5]].astype(bool).any(axis=1).all()


@pytest.mark.parametrize("changes", [(), LITTLE_SHARED])
@pytest.mark.parametrize("shape", [(8, 48), (8, 7), (8, 203)])
def test_rows_that_are_not_finite_spoil_no_other(shape, changes):
    logits, labels, shares = inputs(*shape, ml_dtypes.bfloat16)
    clean = run(logits, labels, shares, changes=changes)
    logits[1, 3], logits[2, 3], logits[3, :], logits[4, 3] = np.nan, np.inf, -np.inf, -np.inf
    labels[5], labels[6], labels[7] = -1, shape[1], np.iinfo(np.int32).min
    labels[1:5] = 1
    gradient, loss, lse = run(logits, labels, shares, changes=changes)
    for ours, other in zip((gradient, loss, lse), clean, strict=True):
        assert_same_bits(ours[0], other[0])
    assert list(lse[1:4]) == pytest.approx([np.nan, np.inf, -np.inf], nan_ok=True)
    assert np.isfinite(lse[4:]).all() and np.isfinite(loss[4])
    assert np.isnan(loss[5:]).all() and np.isnan(gradient[[1, 3, 5, 6, 7]].astype(np.float32)).all()
    infinite = gradient[2].astype(np.float32)  # its softmax is 0 of all but the infinite one, infinity less infinity
    assert np.isnan(infinite[3])
    assert gradient[4, 3] == 0 and np.isfinite(gradient[4].astype(np.float32)).all()


def test_another_formula_would_be_noticed():
    arguments = inputs(3, 48, ml_dtypes.bfloat16)
    gradient, loss, lse = run(*arguments)
    for wrong in (
        (gradient * 0, loss, lse),
        (gradient, loss * 0, lse),
        (gradient, loss, loss),
        run(*arguments, z_loss=0),
    ):
        with pytest.raises(AssertionError):
            check(*arguments, wrong)


# What is wrong then, and what notices it.
HEADER, REDUCE, AHEAD = "device/cross_entropy.cuh", "device/reduce.cuh", "device/cross_entropy_ahead.cuh"
CHOSEN = "  const float chosen = threadIdx.x == 0 ? label.chosen(logits) : 0.0f;\n"
RESULT = "  const Result result(merge<T>(measured, scratch), rows.z_loss, label.share);\n"
MISTAKES = {
    "no label": (HEADER, "j == place ? label.share : 0.0f", "0.0f"),
    "the label of the vector before": (HEADER, "static_cast<unsigned>(col);", "static_cast<unsigned>(col) - 8;"),
    "no factor of the z-loss": (HEADER, "__fmaf_rn(2.0f * z_loss, lse, 1.0f)", "1.0f"),
    "no share": (HEADER, "factor = __fmul_rn(share, ", "factor = __fmul_rn(1.0f, "),
    "not rescaled": (HEADER, "sum = __fmul_rn(sum, exponential<T>(__fsub_rn(largest, raised)));", ""),
    "not rescaled with the block": (HEADER, "measured.raise<T>(block_max", "(void)(block_max"),
    "the label's logit after it is overwritten": (HEADER, CHOSEN + RESULT, RESULT + CHOSEN),
    "no barrier in the maximum": (REDUCE, "  __syncthreads();\n  return warp_max", "  return warp_max"),
    "no barrier in the sum": (REDUCE, "  __syncthreads();\n  const bool filled", "  const bool filled"),
    "more kept than there is room for": (HEADER, "col < part.end && col - part.begin < held", "col < part.end"),
    "nothing kept": (HEADER, "col < part.end && col - part.begin < held", "col < 0"),
    "a vector too few": (HEADER, "end = first + (", "end = first - kVectorWidth + ("),
    "one row for all": (HEADER, "rows.logits + row * rows.vocab", "rows.logits"),
}


@pytest.mark.parametrize("mistake", planted(MISTAKES))
def test_a_mistake_is_noticed(mistake):
    arguments = inputs(2, 4200, ml_dtypes.bfloat16)
    changes = (MISTAKES[mistake], *(NO_CLUSTERS if "room" in mistake else ()))
    with pytest.raises((EmulationError, AssertionError)):
        check(*arguments, run(*arguments, changes=changes))


BETWEEN = "  Coming<T> next(rows, row, member, buffers);\n  end_batch();\n"
CLUSTER_MISTAKES = {
    "a row that is not waited for": (AHEAD, "    wait_for_earlier_batches();\n", ""),
    "a row that is waited for too late": ("device/own_slots.cuh", '"n"(1) : "memory"', '"n"(2) : "memory"'),
    "batches that do not end": (AHEAD, "    end_batch();\n", ""),
    "the next row over the present one": (AHEAD, "buffers + (round + 1) % 2 * held", "buffers + round % 2 * held"),
    "one buffer": (AHEAD, "const kept = buffers + round % 2 * held", "const kept = buffers"),
    "measures that are not waited for": (AHEAD, "    wait(complete, round / 2 % 2);\n", ""),
    "measures of two rows at one place": (AHEAD, "told.parts[round % 2]", "told.parts[0]"),
    "the phase of every row": (AHEAD, "wait(complete, round / 2 % 2)", "wait(complete, round % 2)"),
    "bytes of one block": (AHEAD, "count * static_cast<int>(sizeof", "kAheadWarps * static_cast<int>(sizeof"),
    "one block that is told": (AHEAD, "lane >> log2_blocks == 0", "lane == 0"),
    "no barrier before the first measures are sent": (
        AHEAD,
        f"  arrive_at_cluster();\n{BETWEEN}  wait_for_cluster();\n",
        BETWEEN,
    ),
    "barriers that are not begun": (AHEAD, "    start(told.complete[1], 1);\n", ""),
    "parts that are not rescaled": (AHEAD, "      part[i].raise<T>(row.largest);\n", ""),
    "one block less": (AHEAD, "at < count ? parts", "at < count - kAheadWarps ? parts"),
    "the first part for all": (HEADER, "vectors * block >> log2_blocks", "vectors * 0 >> log2_blocks"),
    "lone elements in every block": (HEADER, "if (block != 0 || lone", "if (lone"),
    "no lone elements in the sum": (AHEAD, "if (row.part.lone >= 0) measured.add", "if (false) measured.add"),
    "the label of another row": (AHEAD, "of_lane(rows, round % kWarp)", "of_lane(rows, 0)"),
    "labels of 32 rows": (AHEAD, "if (round % kWarp == 0) labels.load", "if (round == 0) labels.load"),
    "labels of neighbouring rows": (AHEAD, "static_cast<int64_t>(threadIdx.x % kWarp) * step", "threadIdx.x % kWarp"),
    "nobody who tells of a lone label": (AHEAD, "return part.lone == label.label || ", "return "),
    "nobody who tells of no token": (AHEAD, "return member.block == 0 && thread == 0", "return false"),
    "a row that two clusters have": (AHEAD, "row < count; row += clusters,", "row < count; ++row,"),
}


@pytest.mark.parametrize("mistake", planted(CLUSTER_MISTAKES))
def test_a_mistake_in_a_cluster_is_noticed(mistake):
    rows = 68 if "labels of" in mistake else 12  # more than two clusters have lanes for, and more than buffers
    logits, labels, shares = inputs(rows, 205, ml_dtypes.bfloat16)
    labels[:4], labels[4] = [0, 60, 140, 204], -1
    gradient, loss, lse = run(logits, labels, shares, changes=LITTLE_SHARED)
    tokens = np.arange(rows) != 4
    check(logits[tokens], labels[tokens], shares[tokens], (gradient[tokens], loss[tokens], lse[tokens]))
    with pytest.raises((EmulationError, AssertionError)):
        wrong = run(logits, labels, shares, changes=(CLUSTER_MISTAKES[mistake], *LITTLE_SHARED))
        for ours, other in zip(wrong, (gradient, loss, lse), strict=True):
            assert_same_bits(ours, other)


LONE_MISTAKES = {
    "no lone elements": (HEADER, "|| lone >= vocab) lone = -1", "|| lone >= 0) lone = -1"),
    "no lone elements at the end": (HEADER, "|| lone >= vocab) lone = -1", "|| lone >= first) lone = -1"),
    "every row begins where memory is aligned": (HEADER, "(kAligned - after) % kAligned", "0"),
    "no label": (HEADER, "col == label.label ? label.share : 0.0f", "0.0f"),
}


@pytest.mark.parametrize("mistake", planted(LONE_MISTAKES))
def test_a_mistake_with_any_vocabulary_is_noticed(mistake):
    logits, labels, shares = inputs(5, 777, ml_dtypes.bfloat16)
    labels[:] = [0, 1, 776, 775, 5]
    with pytest.raises((EmulationError, AssertionError)):
        check(logits, labels, shares, run(logits, labels, shares, changes=(LONE_MISTAKES[mistake],)))


ANY_MISTAKES = {
    "an element too few": (HEADER, "col < rows.vocab; col += kThreads", "col < rows.vocab - 1; col += kThreads"),
    "one row for all": (HEADER, "rows.logits + row * rows.vocab", "rows.logits"),
}


@pytest.mark.parametrize("mistake", planted(ANY_MISTAKES))
def test_a_mistake_with_arrays_aligned_otherwise_is_noticed(mistake):
    arguments = inputs(2, 777, ml_dtypes.bfloat16)
    with pytest.raises((EmulationError, AssertionError)):
        check(*arguments, run(*arguments, in_place=False, offset=(0, 2), changes=(ANY_MISTAKES[mistake],)))
