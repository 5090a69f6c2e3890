"""The kernel of the loss and the GEMM that adds up a weight's gradient, on a GPU: against NumPy in float64; then speed.

    python tests/gpu/cross_entropy_check.py --output cross_entropy_check.json      # two minutes on an H200
    python tests/gpu/cross_entropy_check.py --self-test                # the reference in the kernels' place, on a CPU

Every program runs twice, each time over memory filled with another pattern, and must give the same bytes. Ends with one
line per timing and per group of checks, and with exit code 1 if a check failed.
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu.kernel_check import IN_A_GRAPH, SOURCES, WORKSPACE, seconds_per_call, twice_over_poison
from gpu.report import Report, Script, as_bytes, on_gpu, run_script
from losses import cross_entropy

from jax_fp8.kernels.cross_entropy import cross_entropy_gradient
from jax_fp8.kernels.weight_gradient import weight_gradient
from jax_fp8.ops.cross_entropy import linear_cross_entropy

Z_LOSS = 0.03
SHAPES = ((256, 50304), (65, 50257), (160, 128256), (300, 4096), (33, 32768), (2048, 1000), (5, 8), (7, 1), (3, 65537))
SHAPES += ((2, 2**21 + 8), (0, 64), (110, 128251), (12, 151936), (3, 262144))
SMALL = ((5, 16), (3, 77), (2, 4104), (0, 64))
PRODUCTS = ((2048, 50304, 256), (512, 1024, 2048), (24, 48, 32), (1000, 8, 16), (17, 264, 40))  # tokens, n, k
SMALL_PRODUCTS = ((24, 48, 32), (17, 264, 40), (16, 44, 32))
TIMED = ((2048, 50304), (2048, 50257), (2048, 128256), (2048, 151936))
TIMED_ALONE = ((16384, 50304), (4096, 50257), (4096, 128256), (8192, 128256), (4096, 151936))  # without XLA's
REPEATS = 5  # samples of a timing
TIMED_PRODUCT = (2048, 50304, 2048)

LSE = 1e-6  # absolute and relative, of float32
LOSS = 3e-6
SAME = 0.99  # the least share of elements that float32 and float64 round the same way
GRADIENT = {
    jnp.float32: 3e-6,
    jnp.bfloat16: 1.02 * 2**-8,
    jnp.float16: 1.02 * 2**-11,
}  # norm of a row's error, relative: one rounding
UNDERFLOW = {
    jnp.float32: 0,
    jnp.bfloat16: 0,
    jnp.float16: 2**-25,
}  # of an element's, absolute: half the smallest float16
CANCELLED = 3e-7  # and as a share of what a token counts: of its label, 1 is subtracted
SUMS = 1e-5  # of products of 16-bit numbers, added up in float32


def draw(seed, shape, dtype, size=2.0) -> np.ndarray:
    return (np.float32(size) * np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def inputs(seed, shape, dtype, size=2.0):
    """Logits, labels and shares, some of them 0."""
    random = np.random.default_rng(seed + 1000)
    labels = random.integers(0, shape[1], shape[0]).astype(np.int32)
    shares = random.random(shape[0]).astype(np.float32) * (random.random(shape[0]) < 0.9)
    return draw(seed, shape, dtype, size), labels, shares


@partial(jax.jit, donate_argnums=0)
def run(logits, labels, shares):
    """Gradient, losses and lse of rows; the gradient overwrites the logits."""
    results = cross_entropy_gradient(logits[None], labels[None], shares[None], Z_LOSS)
    return [array[0] for array in results]


def computed(logits, labels, shares):
    """The results of two runs over poison, as NumPy arrays; `run` donates its first argument."""
    return twice_over_poison(lambda *arrays: run(jnp.array(arrays[0]), *arrays[1:]), logits, labels, shares)


# ---- the loss --------------------------------------------------------------------------------------------------------


def errors(got, wanted, dtype, shares) -> dict[str, bool]:
    """Which results are right."""
    gradient, loss, lse = got
    right = {
        "lse": bool(np.allclose(lse, wanted[2], rtol=LSE, atol=LSE)),
        "loss": bool(np.allclose(loss, wanted[1], rtol=LOSS, atol=LOSS)),
    }
    size = np.linalg.norm(wanted[0], axis=1)
    error = np.linalg.norm(gradient.astype(np.float64) - wanted[0], axis=1)
    underflow = UNDERFLOW[dtype] * np.sqrt(gradient.shape[1])
    right["gradient"] = bool(np.all(error <= GRADIENT[dtype] * size + CANCELLED * shares + underflow))
    if dtype == jnp.bfloat16 and gradient.size > 1000:
        right["gradient, rounded"] = bool(np.mean(gradient == wanted[0].astype(dtype)) >= SAME)
    return right


def check_rows(report: Report):
    for number, shape in enumerate(SHAPES if on_gpu() else SMALL):
        for dtype in SOURCES:
            arguments = inputs(number, shape, dtype)
            label = f"{jnp.dtype(dtype).name}{list(shape)}"
            first, second = computed(*arguments)
            same = all(np.array_equal(*map(as_bytes, pair)) for pair in zip(first, second, strict=True))
            report.expect("two runs, the same bytes", same, label)
            for what, right in errors(first, cross_entropy(*arguments, Z_LOSS), dtype, arguments[2]).items():
                report.expect(f"rows: {what}", right, label)
            masked = np.asarray(first[0])[arguments[2] == 0]
            report.expect("rows: a share of 0", not masked.any(), label)


def check_large_logits(report: Report):
    """A maximum that rises from thread to thread, and logits at which float32's exponential overflows."""
    for shape in ((64, 50304), (64, 50257)) if on_gpu() else ((4, 80), (4, 77)):
        for dtype in (jnp.bfloat16, jnp.float32) if on_gpu() else (jnp.bfloat16,):
            logits, labels, shares = inputs(5, shape, np.float32)
            logits = (logits + np.linspace(-500, 500, shape[1], dtype=np.float32)).astype(dtype)
            got, _ = computed(logits, labels, shares)
            gradient = cross_entropy(logits, labels, shares, Z_LOSS)[0]
            error = np.linalg.norm(got[0].astype(np.float64) - gradient) / np.linalg.norm(gradient)
            allowed = 10 * GRADIENT[dtype] if on_gpu() else 0.02  # the reference compares with a large lse
            report.expect("large logits", error < allowed, f"{jnp.dtype(dtype).name}{list(shape)}: {error:.1e}")


def check_controls(report: Report):
    """Negative controls: another label, another share, no z-loss or a row of zeros fails."""
    logits, labels, shares = inputs(3, (64, 4096) if on_gpu() else (4, 80), jnp.bfloat16)
    shares[0] = 1
    got, _ = computed(logits, labels, shares)
    other_label, other_share, zeros = labels.copy(), shares.copy(), got[0].copy()
    other_label[0] ^= 1
    other_share[0] += 0.01
    zeros[0] = 0
    right = errors(got, cross_entropy(logits, labels, shares, Z_LOSS), jnp.bfloat16, shares)
    report.expect("controls", all(right.values()), "the right ones")
    for what, found in {
        "another label": errors(got, cross_entropy(logits, other_label, shares, Z_LOSS), jnp.bfloat16, shares),
        "another share": errors(got, cross_entropy(logits, labels, other_share, Z_LOSS), jnp.bfloat16, shares),
        "no z-loss": errors(got, cross_entropy(logits, labels, shares, 0), jnp.bfloat16, shares),
        "a row of zeros": errors(
            [zeros, *got[1:]], cross_entropy(logits, labels, shares, Z_LOSS), jnp.bfloat16, shares
        ),
    }.items():
        report.expect("controls", not found["gradient"], f"{what} is not noticed")


def check_special_values(report: Report):
    """Rows that are not finite, or whose label is no token, change no other row."""
    for shape in ((64, 50304), (64, 50257), (64, 128251), (16, 70)) if on_gpu() else ((16, 80), (16, 77)):
        logits, labels, shares = inputs(4, shape, jnp.bfloat16)
        clean, _ = computed(logits, labels, shares)
        labels[1:5], shares[1:8] = 1, 1
        logits[1, 3], logits[2, 3], logits[3, :], logits[4, 3] = np.nan, np.inf, -np.inf, -np.inf
        labels[5], labels[6], labels[7] = -1, shape[1], np.iinfo(np.int32).min
        (gradient, loss, lse), _ = computed(logits, labels, shares)
        others, label = np.r_[0, 8 : shape[0]], str(list(shape))
        for array, alone in zip((gradient, loss, lse), clean, strict=True):
            report.bits("special values", array[others], alone[others], f"other rows of {label}")
        report.expect("special values", np.isnan(lse[1]) and lse[2] == np.inf and lse[3] == -np.inf, f"lse of {label}")
        report.expect(
            "special values", np.isfinite([loss[4], lse[4]]).all() and gradient[4, 3] == 0, f"-inf of {label}"
        )
        unknown = gradient[[1, 3, 5, 6, 7]].astype(np.float32)
        report.expect("special values", np.isnan(unknown).all() and np.isnan(loss[5:8]).all(), f"NaN of {label}")


def check_many_elements(report: Report):
    """More than 2**31 elements: the last rows are the same as alone."""
    if not on_gpu():
        return
    for shape in ((44032, 50304), (44032, 50257)):
        kept = np.r_[0:16, shape[0] - 16 : shape[0]]
        ends, labels, shares = inputs(6, (32, shape[1]), jnp.bfloat16)
        logits = jnp.zeros(shape, jnp.bfloat16).at[kept].set(ends)
        all_labels, all_shares = (np.resize(array, shape[0]) for array in (labels, shares))
        all_labels[kept], all_shares[kept] = labels, shares
        gradient, loss, lse = run(logits, all_labels, all_shares)
        for array, alone in zip(
            (gradient[kept], loss[kept], lse[kept]), computed(ends, labels, shares)[0], strict=True
        ):
            report.bits("over 2**31 elements", array, alone, str(list(shape)))
        del gradient, logits


# ---- the gradient of a weight ----------------------------------------------------------------------------------------


def relative(got, wanted) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - wanted) / max(np.linalg.norm(wanted), 1e-30))


def check_weight_gradient(report: Report):
    for number, (tokens, n, k) in enumerate(PRODUCTS if on_gpu() else SMALL_PRODUCTS):
        for dtype in (jnp.bfloat16, jnp.float16):
            dy, x, total = (
                draw(3 * number + i, shape, kind)
                for i, (shape, kind) in enumerate(
                    [((1, tokens, n), dtype), ((1, tokens, k), dtype), ((n, k), np.float32)]
                )
            )
            product = dy[0].astype(np.float64).T @ x[0].astype(np.float64)
            label = f"{jnp.dtype(dtype).name} ({tokens}, {n})ᵀ · ({tokens}, {k})"
            for addend, wanted in (((), product), ((total,), product + total)):
                first, second = twice_over_poison(jax.jit(weight_gradient), dy, x, *addend)
                report.bits("weight gradient is deterministic", first, second, label)
                error = relative(first, wanted)
                report.expect("weight gradient", error < SUMS, f"{label} + {len(addend)} addends: {error:.1e}")
            for what, wrong in {"no total": product, "another total": product + total[::-1], "zero": 0 * total}.items():
                noticed = relative(wrong, product + total) > 10 * SUMS
                report.expect("weight gradient: controls", noticed, f"{label}: {what} is not noticed")
            in_place = jax.jit(weight_gradient, donate_argnums=2)(dy, x, jnp.array(total))
            report.bits("weight gradient in place", in_place, first, label)


def check_head(report: Report):
    """Loss and gradients of a head computed in chunks, against float64."""
    batch, seq, hidden, vocab = (2, 256, 128, 50304) if on_gpu() else (2, 8, 16, 80)
    x, weight = draw(1, (batch, seq, hidden), jnp.bfloat16, 0.5), draw(2, (vocab, hidden), np.float32, 0.3)
    labels = np.random.default_rng(3).integers(0, vocab, (batch, seq)).astype(np.int32)
    step = jax.jit(jax.value_and_grad(partial(linear_cross_entropy, chunks=4, z_loss=Z_LOSS), (0, 1)))
    (loss, (dx, dweight)), second = twice_over_poison(step, x, weight, labels)
    for got, again in zip(jax.tree.leaves((loss, dx, dweight)), jax.tree.leaves(second), strict=True):
        report.bits("head: two runs", got, again, "the same bytes")
    rows, rounded = x.reshape(-1, hidden).astype(np.float64), weight.astype(jnp.bfloat16).astype(np.float64)
    shares = np.full(batch * seq, 1 / (batch * seq))
    slope, losses, _ = cross_entropy(rows @ rounded.T, labels.reshape(-1), shares, Z_LOSS)
    report.expect("head: loss", abs(float(loss) / losses.sum() - 1) < 1e-3, f"{loss} instead of {losses.sum()}")
    for what, got, wanted in (("dx", dx.reshape(-1, hidden), slope @ rounded), ("dweight", dweight, slope.T @ rows)):
        error = relative(got, wanted)
        report.expect(f"head: {what}", 1e-6 < error < 8e-3, f"{error:.1e}")


# ---- graphs, refusals ------------------------------------------------------------------------------------------------


def check_graphs(report: Report):
    """A CUDA graph, captured and replayed, gives the same bytes as a run without one."""
    if not on_gpu():
        return

    def chain(logits, labels, shares, x, total):
        gradient, loss, lse = cross_entropy_gradient(logits, labels, shares, Z_LOSS)
        return gradient, loss, lse, weight_gradient(gradient, x, total)

    captured = jax.jit(chain, compiler_options=IN_A_GRAPH)
    plain = jax.jit(chain, compiler_options={"xla_gpu_enable_command_buffer": ""})
    for number in range(5):
        vocab = 50304 if number % 2 else 1024
        logits, labels, shares = (array[None] for array in inputs(number, (48, vocab), jnp.bfloat16))
        others = draw(number, (1, 48, 64), jnp.bfloat16), draw(number, (vocab, 64), np.float32)
        runs = captured(logits, labels, shares, *others), plain(logits, labels, shares, *others)
        for got, wanted in zip(*runs, strict=True):
            report.bits("CUDA graph", got, wanted, f"run {number}")


def check_refusals(report: Report):
    """Every call that breaks the contract raises, and the message names operation and argument."""
    if not on_gpu():
        return

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    def loss(gradient=(32, 64), losses=32):
        results = [array(*gradient, dtype=jnp.bfloat16), array(losses), array(32)]
        return partial(jax.ffi.ffi_call("jax_fp8_cross_entropy", results), z_loss=np.float32(0))

    def product(*shape, dtype=jnp.float32):
        return jax.ffi.ffi_call("jax_fp8_weight_gradient", [array(*shape, dtype=dtype), WORKSPACE])

    x, labels, shares = jnp.ones((32, 64), jnp.bfloat16), jnp.ones(32, jnp.int32), jnp.ones(32)
    cases = [
        (loss(), (x, labels[1:], shares), "labels must have shape [32]"),
        (loss(), (x, shares, shares), "labels must be int32"),
        (loss(), (x, labels, shares[1:]), "shares must have shape [32]"),
        (loss(), (x.astype(jnp.int32), labels, shares), "logits must be float32"),
        (loss(gradient=(64, 32)), (x, labels, shares), "the result gradient must have shape [32, 64]"),
        (loss(losses=31), (x, labels, shares), "the result loss must have shape [32]"),
        (product(64, 64), (x, x[1:]), "x must have shape [32, 64]"),
        (product(64, 32), (x, x), "the result d must have shape [64, 64]"),
        (product(64, 64, dtype=jnp.bfloat16), (x, x), "the result d must be float32"),
        (product(64, 64), (x.astype(jnp.float32), x), "dy must be bfloat16 or float16"),
        (product(64, 60), (x, x[:, :60]), "x must have a last dim that is a multiple of 8"),
        (product(64, 64), (x, x, jnp.ones((32, 64))), "total must have shape [64, 64]"),
    ]
    for call, args, fragment in cases:
        try:
            jax.block_until_ready(jax.jit(call)(*args))
            report.expect("refusals", False, f"nothing was raised where {fragment!r} was due")
        except jax.errors.JaxRuntimeError as error:
            report.expect("refusals", fragment in str(error), f"{fragment!r} is not in: {error}")


# ---- speed -----------------------------------------------------------------------------------------------------------


def seconds_in_place(function, batches) -> float:
    """The time of a call that overwrites its first argument: three in a row minus one, which cancels the copy."""

    def repeated(times, first, *others):
        for _ in range(times):
            first = function(first, *others)
        return first

    one, three = (seconds_per_call(partial(repeated, times), batches, REPEATS) for times in (1, 3))
    return (three - one) / 2


def plain_gradient(logits, labels, shares):
    """The formula as XLA compiles it."""
    x = logits.astype(jnp.float32)
    lse = jax.nn.logsumexp(x, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(x, labels[..., None], axis=-1)
    loss = (lse - chosen + Z_LOSS * jnp.square(lse)) * shares[..., None]
    onehot = labels[..., None] == jnp.arange(x.shape[-1])
    gradient = (jnp.exp(x - lse) * (1 + 2 * Z_LOSS * lse) - onehot) * shares[..., None]
    return jax.lax.optimization_barrier((gradient.astype(logits.dtype), loss))[0]


@partial(jax.jit, static_argnums=1)
def drawn_on_device(seed, shape):
    """Logits, labels and shares like those of `inputs`, drawn on the device: the host would take too long."""
    of_logits, of_labels, of_shares, of_zeros = jax.random.split(jax.random.key(seed), 4)
    labels = jax.random.randint(of_labels, (1, shape[0]), 0, shape[1])
    shares = jax.random.uniform(of_shares, labels.shape) * jax.random.bernoulli(of_zeros, 0.9, labels.shape)
    return 2 * jax.random.normal(of_logits, (1, *shape), jnp.bfloat16), labels, shares


def time_losses(report: Report):
    ours = {"cross_entropy_gradient": lambda *arguments: cross_entropy_gradient(*arguments, Z_LOSS)[0]}
    for shape in TIMED + TIMED_ALONE:
        size = 2 * int(np.prod(shape))  # of the logits; as much is written
        batches = [drawn_on_device(i, shape) for i in range(3)]
        copies = [(jax.random.bits(jax.random.key(i), (size // 4,), jnp.uint32),) for i in range(4)]
        copy = seconds_per_call(lambda x: x ^ jnp.uint32(1), copies, REPEATS)
        del copies
        for what, function in (ours | ({"  XLA's": plain_gradient} if shape in TIMED else {})).items():
            seconds = seconds_in_place(function, batches)
            row = {
                "what": what,
                "shape": f"bfloat16{list(shape)}",
                "us": seconds * 1e6,
                "GB/s": 2 * size / seconds / 1e9,
            }
            report.timings.append(row | {"share of copy": copy / seconds})


def time_weight_gradients(report: Report):
    tokens, n, k = TIMED_PRODUCT
    batches = [
        (
            jnp.zeros((n, k)),
            jax.random.normal(jax.random.key(2 * i), (1, tokens, n), jnp.bfloat16),
            jax.random.normal(jax.random.key(2 * i + 1), (1, tokens, k), jnp.bfloat16),
        )
        for i in range(2)
    ]

    def plain(total, dy, x):
        dy, total = jax.lax.optimization_barrier((dy, total))  # or three in a row would be one
        product = jnp.einsum("bsn,bsk->nk", dy, x, preferred_element_type=jnp.float32)
        return jax.lax.optimization_barrier(total + product)

    for what, function in (("weight_gradient", lambda total, dy, x: weight_gradient(dy, x, total)), ("  XLA's", plain)):
        seconds = seconds_in_place(function, batches)
        row = {"what": what, "shape": f"({tokens}, {n})ᵀ · ({tokens}, {k})", "us": seconds * 1e6}
        report.timings.append(row | {"TFLOP/s": 2 * tokens * n * k / seconds / 1e12})


CHECKS = [check_rows, check_large_logits, check_controls, check_special_values, check_weight_gradient, check_head]
CHECKS += [check_many_elements, check_graphs, check_refusals]
TIMINGS = [time_losses, time_weight_gradients]


def main(arguments: list[str] | None = None) -> int:
    script = Script(__file__, __doc__, CHECKS, TIMINGS, target="jax_fp8_cross_entropy", self_test=True)
    return run_script(script, arguments)


if __name__ == "__main__":
    sys.exit(main())
