"""The loss by chunks against its formula in float64: value, gradients, masks, z-loss,
and numbers that overflow naive code.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_fp8.core.recipe import CurrentScaling, DelayedScaling
from jax_fp8.ops.cross_entropy import cross_entropy, linear_cross_entropy

BATCH, SEQ, HIDDEN, VOCAB = 4, 24, 32, 80


def inputs(dtype=jnp.float32, size=1.0):
    rng = np.random.default_rng(0)
    x = (size * rng.normal(size=(BATCH, SEQ, HIDDEN))).astype(dtype)
    weight = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    return x, weight, rng.integers(0, VOCAB, (BATCH, SEQ), np.int32)


def without_one(replacement, dtype=bool) -> np.ndarray:
    """A mask of ones but for one token."""
    mask = np.ones((BATCH, SEQ), dtype)
    mask[1, 5] = replacement
    return mask


LINEAR, APART = jax.jit(linear_cross_entropy), jax.jit(cross_entropy)


MASKS = {
    "all": None,
    "some": np.random.default_rng(0).random((BATCH, SEQ)) < 0.6,
    "weights": np.random.default_rng(1).random((BATCH, SEQ)).astype(np.float32),
}


def oracle(x, weight, labels, mask=None, z_loss=0.0):
    """Loss and gradients in float64."""
    x, weight, labels = (np.asarray(array).astype(kind) for array, kind in ((x, "f8"), (weight, "f8"), (labels, int)))
    share = np.ones(labels.shape) if mask is None else np.asarray(mask, np.float64)
    share = share / share.sum()
    logits = x @ weight.T
    largest = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - largest).sum(-1, keepdims=True)) + largest
    chosen = np.take_along_axis(logits, labels[..., None], -1)
    loss = ((lse - chosen + z_loss * lse**2)[..., 0] * share).sum()
    slope = np.exp(logits - lse) * (1 + 2 * z_loss * lse) - np.eye(VOCAB)[labels]
    slope = slope * share[..., None]
    return loss, slope @ weight, np.einsum("bsv,bsh->vh", slope, x)


def compute(*arguments, **settings):
    """Loss and gradients, times 100: of order one."""

    def scaled(x, weight, labels):
        return 100 * linear_cross_entropy(x, weight, labels, **settings)

    loss, grads = jax.jit(jax.value_and_grad(scaled, (0, 1)))(*arguments)
    return loss / 100, *grads


@pytest.mark.parametrize("chunks", [1, 3, 24, None])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_against_float64(chunks, mask):
    loss, dx, dweight = compute(*inputs(), mask=mask, chunks=chunks)
    expected, expected_dx, expected_dweight = oracle(*inputs(), mask)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    reference.assert_close(dx, 100 * expected_dx, "float32")
    reference.assert_close(dweight, 100 * expected_dweight, "float32")
    if mask is not None:  # what is masked matters
        assert expected != pytest.approx(oracle(*inputs())[0], rel=1e-3)
    for zero, real in ((dx, expected_dx), (dweight, expected_dweight)):
        with pytest.raises(AssertionError, match="relative error"):
            reference.assert_close(np.zeros_like(zero), 100 * real, "float32")


@pytest.mark.parametrize(("divisor", "cap"), [(4.0, None), (1.0, 3.0), (2.0, 1.5)])
@pytest.mark.parametrize("recipe", [None, CurrentScaling()], ids=["plain", "FP8"])
def test_logits_divided_and_capped(divisor, cap, recipe):
    x, weight, labels = inputs(np.float32 if recipe is None else jnp.bfloat16, size=0.3)

    def by_hand(x, weight):
        logits = x.astype(jnp.float32) @ weight.T / divisor
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)) * 100

    def ours(x, weight, **finish):
        return linear_cross_entropy(x, weight, labels, recipe=recipe, chunks=3, **finish) * 100

    wanted, wanted_slopes = jax.value_and_grad(by_hand, argnums=(0, 1))(np.asarray(x, np.float32), weight)
    found, slopes = jax.value_and_grad(partial(ours, divisor=divisor, cap=cap), argnums=(0, 1))(x, weight)
    tolerance = 1e-5 if recipe is None else 0.08
    for got, expected in zip((found, *slopes), (wanted, *wanted_slopes), strict=True):
        distance = np.linalg.norm(np.asarray(got, np.float32) - expected)
        assert distance < tolerance * np.linalg.norm(expected)
    plain = jax.grad(ours, argnums=1)(x, weight)  # a negative control
    assert np.linalg.norm(plain - wanted_slopes[1]) > 0.2 * np.linalg.norm(wanted_slopes[1])
    assert jax.jit(partial(ours, divisor=divisor, cap=cap))(x, weight) == pytest.approx(float(found), rel=1e-5)


def test_z_loss():
    loss, dx, dweight = compute(*inputs(), z_loss=0.1, chunks=2)
    expected, expected_dx, expected_dweight = oracle(*inputs(), z_loss=0.1)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    reference.assert_close(dx, 100 * expected_dx, "float32")
    reference.assert_close(dweight, 100 * expected_dweight, "float32")
    assert expected != pytest.approx(oracle(*inputs())[0], rel=0.1)


def test_bfloat16():
    """Logits are rounded as a head would round them; the gradient of a float32 weight is not."""
    x, weight, labels = inputs(jnp.bfloat16, size=0.2)
    loss, dx, dweight = compute(x, weight, labels, chunks=4)
    rounded = weight.astype(jnp.bfloat16).astype(jnp.float32)
    expected, expected_dx, expected_dweight = oracle(x, rounded, labels)
    assert float(loss) == pytest.approx(expected, rel=1e-3)
    assert (dx.dtype, dweight.dtype) == (jnp.bfloat16, jnp.float32)
    reference.assert_close(dx, 100 * expected_dx, "bfloat16")
    reference.assert_close(dweight, 100 * expected_dweight, "bfloat16")


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_an_fp8_head(z_loss):
    """Within FP8's noise of float64, chunk by chunk as in one."""
    x, weight, labels = inputs(jnp.bfloat16, size=0.2)
    loss, dx, dweight = compute(x, weight, labels, chunks=2, z_loss=z_loss, recipe=CurrentScaling())
    expected, expected_dx, expected_dweight = oracle(x, weight, labels, z_loss=z_loss)
    assert float(loss) == pytest.approx(expected, rel=5e-3)
    reference.assert_close(dx, 100 * expected_dx, "linear_gradient")
    reference.assert_close(dweight, 100 * expected_dweight, "linear_gradient")
    whole = compute(x, weight, labels, chunks=1, z_loss=z_loss, recipe=CurrentScaling())
    reference.assert_close(dx, whole[1], "bfloat16")
    reference.assert_close(dweight, whole[2], "float8_e5m2")  # each chunk has a scale of its own
    plain = compute(x, weight, labels, chunks=2, z_loss=z_loss)
    with pytest.raises(AssertionError, match="relative error"):
        reference.assert_close(dweight, plain[2], "bfloat16")  # it is FP8


def test_logits_that_are_there_already():
    x, weight, labels = inputs()
    settings = {"mask": MASKS["some"], "z_loss": 0.01}
    apart, together = jax.jit(partial(cross_entropy, **settings)), jax.jit(partial(linear_cross_entropy, **settings))
    assert float(apart(x @ weight.T, labels)) == pytest.approx(float(together(x, weight, labels)), rel=1e-6)


def test_the_loss_alone_is_the_loss_of_the_gradient():
    assert float(LINEAR(*inputs())) == float(jax.jit(jax.value_and_grad(linear_cross_entropy))(*inputs())[0])


def test_large_logits_do_not_overflow():
    loss, dx, dweight = compute(*inputs(size=1e4), chunks=2)
    expected, expected_dx, expected_dweight = oracle(*inputs(size=1e4))
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    reference.assert_close(dx, 100 * expected_dx, "bfloat16")
    reference.assert_close(dweight, 100 * expected_dweight, "bfloat16")


def test_nothing_to_count():
    loss, dx, dweight = compute(*inputs(), mask=np.zeros((BATCH, SEQ), bool))
    assert float(loss) == 0
    assert not np.any(dx)
    assert not np.any(dweight)


@pytest.mark.parametrize("weight", [1e-36, 1e-30, 1e30])
def test_weights_of_any_size_are_relative(weight):
    x, head, labels = inputs()
    mask = np.ones((BATCH, SEQ), np.float32)
    expected = compute(x, head, labels, mask=mask)[0]
    assert float(compute(x, head, labels, mask=weight * mask)[0]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("weight", [-1.0, np.nan, -np.inf])
def test_a_weight_that_is_none(weight):
    x, head, labels = inputs()
    mask = without_one(weight, np.float32)
    assert np.isnan(compute(x, head, labels, mask=mask)[0]) and np.isnan(APART(x @ head.T, labels, mask=mask))


def test_the_total_of_a_whole_batch():
    """The mean of the losses of two parts is that of the whole, with its gradients."""
    x, weight, labels = inputs()
    mask = MASKS["weights"] * np.float32([[1], [0], [0.1], [0]])
    expected = compute(x, weight, labels, mask=mask)
    total = np.full(BATCH // 2, np.sum(mask) / 2)
    halves = [
        compute(x[part], weight, labels[part], mask=mask[part], mask_total=total) for part in (np.s_[::2], np.s_[1::2])
    ]
    assert sum(float(half[0]) for half in halves) / 2 == pytest.approx(float(expected[0]), rel=1e-6)
    reference.assert_close((halves[0][2] + halves[1][2]) / 2, expected[2], "float32")
    own = [compute(x[part], weight, labels[part], mask=mask[part])[0] for part in (np.s_[::2], np.s_[1::2])]
    assert abs(np.mean(own) - float(expected[0])) > 1e-2  # negative control


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32"])
def test_labels_of_any_dtype(dtype):
    x, _, labels = inputs()
    # A vocabulary that 8 bits do not hold.
    weight = np.random.default_rng(4).normal(size=(300, HIDDEN)).astype(np.float32)
    logits = x @ weight.T
    for of in (lambda labels: LINEAR(x, weight, labels), lambda labels: APART(logits, labels)):
        assert float(of(labels.astype(dtype))) == pytest.approx(float(of(labels)), rel=1e-6)
    grads = [jax.jit(jax.grad(linear_cross_entropy))(x, weight, kind) for kind in (labels, labels.astype(dtype))]
    np.testing.assert_array_equal(*grads)


def test_a_masked_token_has_no_influence():
    x, weight, labels = inputs()
    mask = without_one(False)
    loss, dx, _ = compute(x, weight, labels, mask=mask)
    x[1, 5] += 3
    labels[1, 5] = 0
    other, _, _ = compute(x, weight, labels, mask=mask)
    assert float(loss) == float(other)
    dx = np.asarray(dx)
    assert not np.any(dx[1, 5])
    assert np.all(np.any(dx[0], axis=-1))


@pytest.mark.parametrize("label", [-100, -1, VOCAB])
def test_a_label_that_is_no_token(label):
    """Silently it would be another token's; where it does not count, it does not matter."""
    x, weight, labels = inputs()
    wrong = labels.copy()
    wrong[1, 5] = label
    assert np.isnan(compute(x, weight, wrong, chunks=2)[0])
    assert np.isnan(APART(x @ weight.T, wrong))
    mask = without_one(False)
    for ours, expected in zip(compute(x, weight, wrong, mask=mask), compute(x, weight, labels, mask=mask), strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_a_sharded_batch(axis_type):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    x, weight, labels = inputs()
    rows, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("data",), ()))
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(array, place) for array, place in ((x, rows), (weight, whole), (labels, rows))]
        found = compute(*sharded, chunks=3)
    for ours, alone in zip(found, compute(x, weight, labels, chunks=3), strict=True):
        reference.assert_close(ours, alone, "float32")


def test_the_custom_call(with_kernels):
    """One a chunk, of rows, written over its operand; and the weight's gradient is added up by as many calls."""
    step = jax.jit(jax.grad(lambda *args: linear_cross_entropy(*args, chunks=3, z_loss=0.5), (0, 1)))
    text = step.trace(*inputs(jnp.bfloat16)).lower(lowering_platforms=("cuda",)).as_text()
    lines = [line for line in text.splitlines() if "@jax_fp8_cross_entropy(" in line]
    assert len(lines) == text.count("@jax_fp8_weight_gradient(") == 3
    for line in lines:
        assert "output_operand_alias" in line and "z_loss = 5.000000e-01 : f32" in line
        assert "(tensor<32x80xbf16>, tensor<32xi32>, tensor<32xf32>)" in line


def test_errors():
    x, weight, labels = inputs()
    with pytest.raises(ValueError, match=r"needs x \(batch, seq, hidden\), weight \(vocab, hidden\) and labels"):
        linear_cross_entropy(x, weight.T, labels)
    with pytest.raises(ValueError, match=r"needs x \(batch, seq, hidden\)"):
        linear_cross_entropy(x, weight, labels[:, :-1])
    with pytest.raises(ValueError, match="labels must be integers, got float32"):
        linear_cross_entropy(x, weight, labels.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"labels must be integers, got bool\[4, 24\]"):
        cross_entropy(jnp.zeros((BATCH, SEQ, VOCAB)), labels > 0)
    with pytest.raises(ValueError, match=r"mask must have the shape of labels \(4, 24\), got \(4,\)"):
        linear_cross_entropy(x, weight, labels, mask=jnp.ones(4))
    with pytest.raises(ValueError, match=r"the head needs CurrentScaling\(\), BlockScaling\(\) or None, got Delayed"):
        linear_cross_entropy(x, weight, labels, recipe=DelayedScaling())
    for split in ((), ("fprop", "dgrad"), ("wgrad",)):
        with pytest.raises(ValueError, match=r'the head needs "dgrad" and "wgrad" in split_accumulator, got .*default'):
            linear_cross_entropy(x, weight, labels, recipe=CurrentScaling(split_accumulator=split))
    with pytest.raises(ValueError, match="FP8 head needs tokens in a chunk divisible by 16, got 12; pad"):
        linear_cross_entropy(x, weight, labels, recipe=CurrentScaling(), chunks=8)
    with pytest.raises(ValueError, match="FP8 head needs vocabulary divisible by 16, got 72"):
        linear_cross_entropy(x, weight[:72], labels, recipe=CurrentScaling())
    for chunks in (0, 5):
        with pytest.raises(
            ValueError, match=f"chunks must divide the sequence, got chunks={chunks} and a sequence of 24"
        ):
            linear_cross_entropy(x, weight, labels, chunks=chunks)
