"""fused_adam against Optax and float64; masters, params, moments of any dtype; skipped steps; saved states; errors."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.optim.updates import InPlace

SHAPES = {"matrix": (33, 17), "vector": (5,), "one": (1,), "empty": (0, 4)}
LARGE = {"matrix": (512, 256), "vector": (278_011,), "one": (1,), "empty": (0,)}
MODES = pytest.mark.parametrize("in_place", [None, InPlace()], ids=["deltas", "in_place"])


def normal(seed, shapes=SHAPES) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def tree(seed, dtype=jnp.float32, shapes=SHAPES):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), normal(seed, shapes))


def make_step(tx, in_place=None, apply=fp8.apply_updates):
    """`params, state = step(params, state, grads)`, jitted."""
    extra = {} if in_place is None else {"in_place": in_place}

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **extra)
        return apply(params, updates), state

    return step


def run(tx, params, steps=50, shapes=SHAPES, **settings):
    state, step = tx.init(params), make_step(tx, **settings)
    for i in range(steps):
        params, state = step(params, state, normal(100 + i, shapes))
    return params, state


MATRICES_DECAY = {"weight_decay": 0.1, "mask": lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)}


@pytest.mark.versions
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (fp8.fused_adam(1e-2), optax.adam(1e-2)),
        (fp8.fused_adam(optax.linear_schedule(1e-2, 0.0, 50)), optax.adam(optax.linear_schedule(1e-2, 0.0, 50))),
        (fp8.fused_adamw(1e-2, **MATRICES_DECAY), optax.adamw(1e-2, **MATRICES_DECAY)),
    ],
    ids=["adam", "schedule", "mask"],
)
def test_float32_is_optax(ours, theirs):
    (actual, state), (expected, _) = run(ours, tree(0)), run(theirs, tree(0))
    for name in SHAPES:
        np.testing.assert_allclose(actual[name], expected[name], rtol=2e-5, atol=2e-6)
    assert state.count == 50
    assert jax.tree.leaves(state.master) == []
    moved = np.abs(np.asarray(actual["matrix"] - tree(0)["matrix"])).mean()
    assert moved > 1e-3  # the tolerance is far below what the steps did


def test_fused_adamw_shows_and_takes_what_fused_adam_does():
    wanted = dict(inspect.signature(fp8.fused_adam).parameters)
    del wanted["adam_w_mode"]
    wanted["weight_decay"] = wanted["weight_decay"].replace(default=1e-4)
    assert list(inspect.signature(fp8.fused_adamw).parameters.values()) == list(wanted.values())
    params, grads = tree(0), tree(1)
    ours, same = fp8.fused_adamw(1e-2, 0.8, 0.9, 1e-6), fp8.fused_adam(1e-2, 0.8, 0.9, 1e-6, 1e-4)
    injected = optax.inject_hyperparams(fp8.fused_adamw)(1e-2, 0.8, 0.9, 1e-6, mu_dtype=jnp.dtype("bfloat16"))
    assert injected.init(params).hyperparams.keys() >= {"learning_rate", "b1", "b2", "eps", "weight_decay"}
    assert injected.init(params).inner_state.mu["matrix"].dtype == jnp.bfloat16
    jax.tree.map(
        assert_same_bits,
        ours.update(grads, ours.init(params), params)[0],
        same.update(grads, same.init(params), params)[0],
    )
    for wrong in ("adam_w_mode", "nesterov"):
        with pytest.raises(TypeError, match=wrong):
            fp8.fused_adamw(1e-2, **{wrong: True})


def float64_run(params, steps, shapes, adam_w_mode, weight_decay, bias_correction, rate=1e-3):
    """Params and moments after some steps of the formulas, in float64."""
    b1, b2, eps = 0.9, 0.999, 1e-8
    p = {name: x.astype(np.float64) for name, x in params.items()}
    m, v = jax.tree.map(np.zeros_like, p), jax.tree.map(np.zeros_like, p)
    for t in range(1, steps + 1):
        gradients = normal(99 + t, shapes)
        for name, g in gradients.items():
            g = g + (0.0 if adam_w_mode else weight_decay * p[name])
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g**2
            corrections = (1 - b1**t, 1 - b2**t) if bias_correction else (1.0, 1.0)
            u = m[name] / corrections[0] / (np.sqrt(v[name] / corrections[1]) + eps)
            p[name] = p[name] - rate * (u + (weight_decay * p[name] if adam_w_mode else 0.0))
    return p, m, v


def ulps(actual, expected) -> float:
    """The largest difference, in float32 steps of the expected number, or of 0.125 where that is smaller."""
    step = np.spacing(np.maximum(np.abs(expected), 0.125).astype(np.float32))
    return np.max(np.abs(np.asarray(actual, np.float64) - expected) / step, initial=0)


@pytest.mark.parametrize(
    ("adam_w_mode", "weight_decay", "bias_correction", "theirs"),
    [
        (True, 0.1, True, optax.adamw(1e-3, weight_decay=0.1)),
        (False, 0.1, True, optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-3))),
        (True, 0.0, False, None),
    ],
    ids=["adamw", "l2", "uncorrected"],
)
def test_fifty_steps_against_float64(adam_w_mode, weight_decay, bias_correction, theirs):
    """As near to float64 as Optax: 50 roundings of a param are about 20 steps in the worst of 400,000 elements."""
    settings = {"adam_w_mode": adam_w_mode, "weight_decay": weight_decay, "bias_correction": bias_correction}
    start = normal(0, LARGE)
    params, state = run(fp8.fused_adam(1e-3, **settings), jax.tree.map(jnp.asarray, start), shapes=LARGE)
    expected, mu, nu = float64_run(start, 50, LARGE, **settings)
    optaxs = None if theirs is None else run(theirs, jax.tree.map(jnp.asarray, start), shapes=LARGE)[0]
    for name in ("matrix", "vector", "one"):
        assert ulps(params[name], expected[name]) < 25
        assert optaxs is None or ulps(optaxs[name], expected[name]) < 25
        reference.assert_close(state.mu[name], mu[name], "float32")
        reference.assert_close(state.nu[name], nu[name], "float32")
        assert ulps(start[name], expected[name]) > 1000  # what the steps did
    assert params["empty"].shape == (0,)


@pytest.mark.parametrize("apply", [fp8.apply_updates, optax.apply_updates], ids=["fp8", "optax"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_params_are_the_rounded_master_at_every_step(dtype, apply):
    """And the masters are what float32 params would be, save those that left a tie."""
    tx, exact = fp8.fused_adamw(1e-3), fp8.fused_adamw(1e-3)
    params, masters = tree(0, dtype), jax.tree.map(lambda p: p.astype(jnp.float32), tree(0, dtype))
    state, exact_state = tx.init(params), exact.init(masters)
    step, exact_step = make_step(tx, apply=apply), make_step(exact)
    for i in range(50):
        params, state = step(params, state, normal(100 + i))
        masters, exact_state = exact_step(masters, exact_state, normal(100 + i))
        for name in SHAPES:
            assert_same_bits(params[name], np.asarray(state.master[name]).astype(dtype))
            assert_same_bits(state.master[name], masters[name])


def test_small_updates_accumulate_where_optax_loses_them():
    params = {"w": jnp.full((4,), 1.0, jnp.bfloat16)}
    grads = {"w": jnp.full((4,), -1.0, jnp.bfloat16)}

    def twenty_steps(tx):
        state, p = tx.init(params), params
        for _ in range(20):
            updates, state = tx.update(grads, state, p)
            p = optax.apply_updates(p, updates)
        return float(p["w"][0])

    assert twenty_steps(optax.adamw(1e-3)) == 1.0
    assert twenty_steps(fp8.fused_adamw(1e-3)) == pytest.approx(1.02, abs=2**-8)
    assert twenty_steps(fp8.fused_adamw(1e-3, master_dtype="remainder")) == pytest.approx(1.02, abs=2**-8)


def fp8_params(dtype) -> dict:
    weights = normal(0, {"w": (48, 32), "odd": (5, 3), "bias": (7,)})
    scales = {name: reference.scale_from_amax(reference.amax(w), dtype) for name, w in weights.items()}
    params = {name: fp8.quantize(jnp.asarray(w), dtype, scales[name]) for name, w in weights.items()}
    return params | {"plain": jnp.ones((3,))}


@pytest.mark.parametrize(
    ("dtype", "master_dtype", "in_place"),
    [(fp8.E4M3, jnp.float32, None), (fp8.E4M3, jnp.float16, InPlace()), (fp8.E5M2, jnp.float32, InPlace())],
    ids=["deltas", "float16", "in_place"],
)
def test_fp8_params_are_the_quantized_master(dtype, master_dtype, in_place):
    params = fp8_params(dtype)
    tx = fp8.fused_adamw(0.03, master_dtype=master_dtype)
    state, step = tx.init(params), make_step(tx, in_place)
    start, first_scale = params["w"].dequantize(), params["w"].scale
    shapes = {name: param.shape for name, param in params.items()}
    for i in range(10):
        amaxes = {name: fp8["amax"] for name, fp8 in state.fp8.items() if fp8 is not None}
        params, state = step(params, state, tree(100 + i, jnp.bfloat16, shapes))
        for name, amax in amaxes.items():
            scale = reference.scale_from_amax(amax, dtype)
            values, amax_now = reference.quantize(state.master[name], dtype, scale)
            assert_same_bits(params[name].scale, scale)
            assert_same_bits(params[name].values, values)
            assert_same_bits(state.fp8[name]["amax"], amax_now)
        assert_same_bits(state.fp8["w"]["transposed"], np.asarray(params["w"].values).T)
        assert state.fp8["odd"]["transposed"] is state.fp8["bias"]["transposed"] is None
    assert reference.relative_error(params["w"].dequantize(), start) > 0.1
    assert params["w"].scale != first_scale


# ---- scaled, clipped and skipped gradients ---------------------------------------------------------------------------


@MODES
def test_grad_scale_undoes_a_loss_scale(in_place):
    tx, params, extra = fp8.fused_adamw(1e-2), tree(0), {} if in_place is None else {"in_place": in_place}
    update = jax.jit(
        lambda g, s, scale: fp8.apply_updates(params, tx.update(g, s, params, grad_scale=scale, **extra)[0])
    )
    grads, state = tree(1), tx.init(params)
    plain = update(grads, state, 1.0)
    scaled = jax.tree.map(lambda g: g * 1024, grads)
    jax.tree.map(assert_same_bits, update(scaled, state, 1 / 1024), plain)
    with pytest.raises(AssertionError, match="elements differ"):  # a factor is not lost on Adam, thanks to eps
        jax.tree.map(assert_same_bits, update(jax.tree.map(lambda g: g * 1e-6, grads), state, 1.0), plain)


@pytest.mark.parametrize("max_norm", [0.3, 1e4], ids=["clipped", "within"])
def test_max_grad_norm_is_clip_by_global_norm(max_norm):
    settings = {"learning_rate": 1e-2, "eps": 0.1}  # with a small eps Adam undoes the clipping
    ours, _ = run(fp8.fused_adam(max_grad_norm=max_norm, **settings), tree(0), 10)
    chained = optax.chain(optax.clip_by_global_norm(max_norm), fp8.fused_adam(**settings))
    theirs, _ = run(chained, tree(0), 10)
    start, (unclipped, _) = tree(0), run(fp8.fused_adam(**settings), tree(0), 10)
    for name in ("matrix", "vector", "one"):
        reference.assert_close(ours[name] - start[name], theirs[name] - start[name], "float32")
        difference = reference.relative_error(unclipped[name] - start[name], theirs[name] - start[name])
        assert (difference > 0.5) == (max_norm == 0.3)


def mixed_params() -> dict:
    weights = normal(0, {"w": (48, 32), "brain": (33, 5), "half": (7,), "full": (3, 4), "eight": (16, 32)})
    eight = fp8.quantize(jnp.asarray(weights["eight"]), fp8.E4M3, 0.01)
    dtypes = {"w": jnp.bfloat16, "brain": jnp.bfloat16, "half": jnp.float16, "full": jnp.float32}
    return {name: jnp.asarray(weights[name], dtype) for name, dtype in dtypes.items()} | {"eight": eight}


def mixed_gradients(seed) -> dict:
    return normal(seed, {name: param.shape for name, param in mixed_params().items()})


@MODES
def test_skip_nonfinite_changes_nothing(in_place):
    params = mixed_params()
    tx = fp8.fused_adamw(1e-2, skip_nonfinite=True, mu_dtype=fp8.E4M3, nu_dtype=fp8.E5M2, max_grad_norm=1.0)
    step = make_step(tx, in_place)
    params, state = step(params, tx.init(params), mixed_gradients(1))
    for bad in (np.inf, -np.inf, np.nan):
        grads = mixed_gradients(2)
        grads["half"][3] = bad
        unchanged = step(params, state, grads)
        jax.tree.map(assert_same_bits, unchanged, (params, state))
    grads["half"][3] = 0
    changed, after = step(*unchanged, grads)
    assert int(after.count) == 2
    for name in ("w", "full"):
        assert (np.asarray(changed[name]) != np.asarray(params[name])).any()


@MODES
def test_what_is_not_finite_spreads_as_in_optax(in_place):
    params, grads = tree(0), normal(1)
    for element, bad in enumerate((np.inf, -np.inf, np.nan)):
        grads["matrix"][3, element] = bad
    ours, theirs = fp8.fused_adam(1e-2), optax.adam(1e-2)
    actual, _ = make_step(ours, in_place)(params, ours.init(params), grads)
    expected, _ = make_step(theirs)(params, theirs.init(params), grads)
    for name in SHAPES:
        assert_same_bits(np.isnan(actual[name]), np.isnan(expected[name]))
    assert np.isnan(actual["matrix"]).sum() == 3


# ---- misuse ----------------------------------------------------------------------------------------------------------


def misuses():
    """The error, the transform, the params that its state is made for, and the params and gradients it is given."""
    ones, half, eight = jnp.ones((3,)), jnp.ones((3,), jnp.float16), fp8.quantize(jnp.ones((3,)), fp8.E4M3, 1.0)
    brain, longer, ids = jnp.ones((3,), jnp.bfloat16), jnp.ones((4,)), jnp.ones((3,), jnp.int32)
    tx, remainder = partial(fp8.fused_adam, 1e-3), partial(fp8.fused_adam, 1e-3, master_dtype="remainder")
    plain = {"w": ones}
    return [
        ("needs the params .*, got None; call update", tx, plain, None, plain),
        ("grads must have the structure of params, but .*; pass", tx, plain, plain, {"v": ones}),
        (r"grads must be .*, got float32 of shape \(4,\) for .* shape \(3,\); pass", tx, plain, plain, {"w": longer}),
        ("grads must be float32, .*, got int32 of shape", tx, plain, plain, {"w": ids}),
        ("mask must have the structure of params, .*; make it", partial(tx, mask={"v": True}), plain, plain, plain),
        ("needs floating point params .*, got int32 of shape .*; mask it", tx, {"w": ids}, plain, plain),
        ('"remainder" needs bfloat16 or float32 params, got float16 of .*; use', remainder, {"w": half}, plain, plain),
        ('"remainder" needs bfloat16 .*, got float8_e4m3fn of .*; use', remainder, {"w": eight}, plain, plain),
        ("master must have the structure of .*; make it", partial(tx, master={"v": ones}), {"w": brain}, plain, plain),
        (r"for a bfloat16 param, got .*\(4,\); make", partial(tx, master={"w": longer}), {"w": brain}, plain, plain),
        ("floating point array of .*, got int32", partial(tx, master={"w": ids}), {"w": brain}, plain, plain),
        ("for a bfloat16 param, got NoneType", partial(tx, master={"w": None}), {"w": brain}, plain, plain),
        ("state.mu must have the structure of params, but .*; pass", tx, {"v": ones}, plain, plain),
        (
            r"state.mu of a float32 param must be float32 of shape \(3,\) .*, got .* shape \(4,\); use",
            tx,
            {"w": longer},
            plain,
            plain,
        ),
        ("state.master of a bfloat16 param must be float32 .*, got nothing; use", tx, plain, {"w": brain}, plain),
        ("state.master of a float32 param must be nothing .*, got float32 of", tx, {"w": brain}, plain, plain),
        (
            r"state.fp8\[amax\] of a float8_e4m3fn param must be float32 of shape \(\) .*, got nothing",
            tx,
            {"w": brain},
            {"w": eight},
            plain,
        ),
        ("master_dtype must be one of float32, .*got int8", partial(tx, master_dtype=jnp.int8), plain, plain, plain),
        ("master_dtype must be .*got residual", partial(tx, master_dtype="residual"), plain, plain, plain),
        ("mu_dtype must be .*got float8_e4m3b11", partial(tx, mu_dtype=jnp.float8_e4m3b11fnuz), plain, plain, plain),
        ("nu_dtype must be .*got remainder", partial(tx, nu_dtype="remainder"), plain, plain, plain),
    ]


@pytest.mark.parametrize("number", range(21))
def test_misuse(number):
    message, make, made_for, params, grads = misuses()[number]
    with pytest.raises(ValueError, match=message):
        tx = make()
        tx.update(grads, tx.init(made_for), params)
