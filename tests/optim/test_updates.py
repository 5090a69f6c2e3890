"""New params in the place of deltas: the same bits, through Optax's combinators, sharded and donated;
and nothing may compute with them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from emitters import jit_as_for_users
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import assert_same_bits

import jax_fp8 as fp8
from jax_fp8.core.fp8_array import Fp8Pair, is_fp8
from jax_fp8.optim.updates import InPlace, NewParam

SHAPES = dict(w=(48, 32), brain=(33, 5), half=(7,), full=(16, 24), scalar=(), empty=(0, 3), eight=(16, 32))
DTYPES = {"w": jnp.bfloat16, "half": jnp.float16}


def normal(seed, shapes=SHAPES) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: np.asarray(random.standard_normal(shape, dtype=np.float32)) for name, shape in shapes.items()}


def mixed_params(with_fp8=True) -> dict:
    params = {name: jnp.asarray(x, DTYPES.get(name, jnp.float32)) for name, x in normal(0).items()}
    return params | ({"eight": fp8.quantize(params["eight"], fp8.E4M3, 0.01)} if with_fp8 else {})


def make_step(tx, in_place, jit=jit_as_for_users):
    @jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **({} if in_place is None else {"in_place": in_place}))
        return fp8.apply_updates(params, updates), state

    return step


def run(tx, params, in_place, steps, jit=jit_as_for_users):
    step, state = make_step(tx, in_place, jit), tx.init(params)
    for i in range(steps):
        params, state = step(params, state, normal(100 + i))
    return params, state


def is_new_param(leaf):
    return isinstance(leaf, NewParam)


def only_matrices(params):
    return jax.tree.map(lambda param: len(param.shape) == 2, params, is_leaf=is_fp8)


def adamw(**settings):
    return fp8.fused_adamw(1e-2, weight_decay=0.1, **settings)


FP8_MOMENTS = adamw(mu_dtype=fp8.E4M3, nu_dtype=fp8.E5M2, skip_nonfinite=True, max_grad_norm=5.0)


@functools.cache
def run_in_place(tx, with_fp8):
    return run(tx, mixed_params(with_fp8), InPlace(), 20)


@pytest.mark.parametrize(
    ("tx", "with_fp8"),
    [
        (adamw(), True),
        (fp8.fused_adam(1e-2, weight_decay=0.1, adam_w_mode=False, mask=only_matrices), True),
        (FP8_MOMENTS, True),
        (adamw(master_dtype=jnp.float16, mu_dtype=jnp.bfloat16, nu_dtype=jnp.bfloat16), True),
        (optax.chain(optax.clip_by_global_norm(0.5), adamw()), True),
        (optax.with_extra_args_support(optax.masked(adamw(), only_matrices)), False),
        # Optax looks for a dtype that all params can be promoted to, and FP8 has none.
        (optax.inject_hyperparams(fp8.fused_adamw)(learning_rate=optax.linear_schedule(1e-2, 0.0, 20)), False),
        (
            optax.multi_transform(
                {"fast": adamw(), "slow": fp8.fused_adam(1e-3)},
                dict.fromkeys(SHAPES, "fast") | {"half": "slow", "full": "slow"},
            ),
            False,
        ),
    ],
    ids=["adamw", "l2", "fp8_moments", "float16_masters", "chain", "masked", "inject_hyperparams", "multi_transform"],
)
def test_in_place_is_deltas(tx, with_fp8):
    params = mixed_params(with_fp8)
    deltas, state = run(tx, params, None, 20)
    in_place, in_place_state = run_in_place(tx, with_fp8)
    jax.tree.map(assert_same_bits, in_place, deltas)
    jax.tree.map(assert_same_bits, in_place_state, state)
    for name in ("w", "full"):
        assert (np.asarray(deltas[name]) != np.asarray(params[name])).any()


def test_another_seed_would_be_noticed():
    """The negative control: the rounding of second moments depends on the step."""
    tx, params = fp8.fused_adam(1e-2, bias_correction=False, nu_dtype=fp8.E4M3), mixed_params()
    state, update = tx.init(params), jax.jit(tx.update)
    _, updated = update(normal(1), state, params)
    _, other = update(normal(1), state._replace(count=state.count + 1), params)
    with pytest.raises(AssertionError, match="elements differ"):
        jax.tree.map(assert_same_bits, other.nu, updated.nu)


@pytest.mark.versions
def test_donated():
    donating = functools.partial(jit_as_for_users, donate_argnums=(0, 1))
    actual = run(FP8_MOMENTS, mixed_params(), InPlace(), 20, jit=donating)
    jax.tree.map(assert_same_bits, actual, run_in_place(FP8_MOMENTS, True))


SHARDED = {"rows": (16, 24), "columns": (8, 32), "vector": (64,), "whole": (5, 3), "scalar": ()}
SPECS = {
    "rows": P("data", None),
    "columns": P(None, "data"),
    "vector": P("data"),
    "whole": P(None, None),
    "scalar": P(),
}
SHARDED_DTYPES = {"rows": jnp.bfloat16, "vector": jnp.float16}


def sharded_params() -> dict:
    return {name: jnp.asarray(x, SHARDED_DTYPES.get(name, jnp.float32)) for name, x in normal(0, SHARDED).items()}


def specs_of(tree):
    """The spec of every array of a params-like tree or of a state: that of its param, P() for scalars."""

    def spec(path, array):
        return next((SPECS[entry.key] for entry in path if array.ndim and getattr(entry, "key", None) in SPECS), P())

    return jax.tree_util.tree_map_with_path(spec, tree)


@functools.cache
def on_one_device(tx, in_place):
    """A step, the params and the state that it begins with, and those after three."""
    step, start = make_step(tx, InPlace() if in_place else None), (sharded_params(), tx.init(sharded_params()))
    after = start
    for i in range(3):
        after = step(*after, normal(100 + i, SHARDED))
    return step, start, after


@pytest.mark.versions
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("tx", "in_place"),
    [(adamw(), None), (adamw(), InPlace()), (adamw(mu_dtype=fp8.E4M3, nu_dtype=jnp.bfloat16), InPlace())],
    ids=["deltas", "in_place", "few_bits"],
)
def test_sharded(tx, in_place, axis_type):
    """Leaves split along different dims by one axis: every device updates its own shard,
    with the bits of one device.
    """
    step, start, plain = on_one_device(tx, in_place is not None)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))

    def place(tree):
        return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs_of(tree))

    placed = place(start)
    with jax.set_mesh(mesh):
        for i in range(3):
            placed = step(*placed, place(normal(100 + i, SHARDED)))
    jax.tree.map(assert_same_bits, placed, plain)
    expected = place(plain)
    jax.tree.map(assert_same_sharding, placed, expected)
    assert not placed[0]["rows"].sharding.is_fully_replicated


def assert_same_sharding(actual, expected):
    assert actual.sharding.is_equivalent_to(expected.sharding, actual.ndim), (actual.sharding, expected.sharding)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["rows", "columns"])
def test_the_amax_of_a_sharded_cast_is_that_of_the_whole(name, axis_type):
    weight = normal(0, SHARDED)[name]
    weight[3, 7] = -99  # one device sees it
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    spec, transposed = SPECS[name], P(*reversed(SPECS[name]))

    def place(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    copies = place(jnp.zeros(weight.shape, fp8.E4M3), spec), place(jnp.zeros(weight.shape[::-1], fp8.E4M3), transposed)
    tx, params = adamw(), {"w": place(jnp.asarray(weight), spec)}

    @jax.jit
    def update(params, copies):
        request = InPlace(
            {("w",): (Fp8Pair.with_shared_scale(*copies, jnp.float32(1), jnp.float32(1)), jnp.float32(0.3))}
        )
        updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params, in_place=request)
        return updates["w"].value, updates["w"].cast

    with jax.set_mesh(mesh):
        value, cast = update(params, copies)
    values, amax = reference.quantize(value, fp8.E4M3, 0.3)
    assert amax > 98
    assert_same_bits(cast.amax, amax)
    assert_same_bits(cast.rowwise.values, values)
    assert_same_bits(cast.columnwise.values, values.T)
    assert_same_sharding(cast.rowwise.values, copies[0])
    assert_same_sharding(cast.columnwise.values, copies[1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_casts(dtype):
    params = {"layer": {"kernel": jnp.asarray(normal(0)["w"], dtype), "bias": jnp.zeros((32,), dtype)}}
    path, tx = ("layer", "kernel"), fp8.fused_adamw(0.1, skip_nonfinite=True)
    copies = Fp8Pair.with_shared_scale(
        jnp.zeros((48, 32), fp8.E4M3), jnp.zeros((32, 48), fp8.E4M3), jnp.float32(9), jnp.float32(8)
    )
    grads = jax.tree.map(jnp.ones_like, params)

    @jax.jit
    def update(grads, params, copies, scale):
        in_place = InPlace({path: (copies, scale)})
        return jax.tree.map(vars, tx.update(grads, tx.init(params), params, in_place=in_place)[0], is_leaf=is_new_param)

    new = update(grads, params, copies, jnp.float32(0.0123))["layer"]
    values, amax = reference.quantize(new["kernel"]["value"], fp8.E4M3, 0.0123)
    cast = new["kernel"]["cast"]
    assert_same_bits(cast.rowwise.values, values)
    assert_same_bits(cast.columnwise.values, values.T)
    assert_same_bits(cast.rowwise.scale, np.float32(0.0123))
    assert_same_bits(cast.amax, amax)
    assert new["bias"]["cast"] is None
    assert reference.amax(params["layer"]["kernel"]) != amax
    skipped = update(jax.tree.map(lambda g: g * jnp.inf, grads), params, copies, jnp.float32(0.0123))["layer"]["kernel"]
    jax.tree.map(assert_same_bits, skipped["cast"], copies)  # as it was, its scale included
    assert_same_bits(skipped["value"], params["layer"]["kernel"])
    assert not skipped["applied"]


# ---- nothing computes with a new param -------------------------------------------------------------------------------

LATE = {
    "operator": optax.stateless(lambda updates, params: jax.tree.map(lambda u: 0.5 * u, updates, is_leaf=is_new_param)),
    "negative": optax.stateless(lambda updates, params: jax.tree.map(lambda u: -u, updates, is_leaf=is_new_param)),
    "jnp": optax.stateless(lambda updates, params: jax.tree.map(jnp.sign, updates, is_leaf=is_new_param)),
    "scale": optax.scale(0.5),
    "schedule": optax.scale_by_schedule(lambda count: 0.5),
    "decay": optax.add_decayed_weights(0.1),
    "clip": optax.clip(0.1),
    "clip_by_global_norm": optax.clip_by_global_norm(1.0),
    "trace": optax.trace(0.9),
}


@pytest.mark.parametrize("late", LATE)
def test_a_transform_after_fused_adam_is_an_error_in_place(late):
    params = {"w": jnp.ones((3, 4)), "b": jnp.ones((4,))}
    grads = jax.tree.map(jnp.ones_like, params)
    tx = optax.chain(fp8.fused_adam(1e-2), LATE[late])
    with pytest.raises(ValueError, match=r"fused_adam must be the last transform .*; move fused_adam to the end"):
        tx.update(grads, tx.init(params), params, in_place=InPlace())
    updates, _ = tx.update(grads, tx.init(params), params)
    assert np.isfinite(np.asarray(updates["w"])).all()


def test_half_the_delta_is_half_the_step():
    params = mixed_params(with_fp8=False)
    tx, halved = adamw(), optax.chain(adamw(), optax.scale(0.5))
    whole, _ = jax.jit(tx.update)(normal(1), tx.init(params), params)
    half, _ = jax.jit(halved.update)(normal(1), halved.init(params), params)
    jax.tree.map(lambda h, w: assert_same_bits(h, np.float32(0.5) * np.asarray(w)), half, whole)


def test_every_operator_refuses():
    new, one = NewParam(jnp.ones(3)), jnp.ones(3)
    for compute in (
        lambda: new + 1,
        lambda: 1 + new,
        lambda: new - one,
        lambda: one - new,
        lambda: new * 2.0,
        lambda: one * new,
        lambda: new / 2,
        lambda: 2 / new,
        lambda: new**2,
        lambda: -new,
        lambda: jnp.square(new),
        lambda: jnp.where(True, new, one),
    ):
        with pytest.raises(ValueError, match="fused_adam must be the last transform"):
            compute()


# ---- apply_updates ---------------------------------------------------------------------------------------------------


def test_deltas_are_added_in_float32_and_rounded_once():
    one, delta = jnp.ones((2,), jnp.bfloat16), jnp.float32([2.0**-8, 2.0**-8 + 2.0**-20])  # a tie, and beyond it
    assert_same_bits(fp8.apply_updates({"w": one}, {"w": delta})["w"], np.array([1, 1 + 2.0**-7], jnp.bfloat16))
    rounded_twice = one + delta.astype(jnp.bfloat16)
    assert rounded_twice[1] == 1  # the negative control


def test_a_delta_of_an_fp8_param_keeps_the_scale():
    param = fp8.quantize(jnp.float32([1.0, -3.0, 100.0]), fp8.E4M3, 0.5)
    delta = jnp.float32([0.25, -1.0, 1000.0])  # the last one saturates
    updated = fp8.apply_updates({"w": param}, {"w": delta})["w"]
    assert_same_bits(updated.scale, np.float32(0.5))
    assert_same_bits(updated.values, reference.quantize(np.float32([1.25, -4.0, 1100.0]), fp8.E4M3, 0.5)[0])


def test_what_is_new_takes_the_params_place():
    param = fp8.quantize(jnp.ones((2,)), fp8.E4M3, 0.5)
    new = fp8.quantize(jnp.ones((2,)), fp8.E4M3, 0.25)
    assert fp8.apply_updates({"w": param}, {"w": new})["w"] is new
    assert fp8.apply_updates({"w": param}, {"w": NewParam(new)})["w"] is new
    value = jnp.ones((2,), jnp.bfloat16)
    assert fp8.apply_updates([value * 2], [NewParam(value)])[0] is value


def test_in_place_asks_for_no_casts_by_default():
    assert InPlace().casts == {}
