"""What a delayed pass keeps and what it leaves to the pass; that it is for later, and for its own microbatch only.

That the gradients are the ordinary ones of any layer is asked in tests/transformations/test_delayed_layers.py.
"""

from functools import partial

import hybrid
import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from delayed import add, assert_same_gradients, delayed, differentiate
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layers import FEATURES, RECIPE, weighted_sum

import jax_fp8 as fp8
from jax_fp8.kernels.vma import vary
from jax_fp8.ops import passes

pytestmark = pytest.mark.versions

CURRENT = fp8.CurrentScaling()
X, WEIGHTS = layers.inputs()


def test_outside_of_jit():
    module = layers.Scanned()
    variables = module.init(jax.random.key(1), X)
    wanted, grads, deferred = differentiate(weighted_sum(module), variables, X, WEIGHTS, transform=lambda fn: fn)
    assert_same_gradients(add(grads, deferred), wanted)


def halved(loss, variables, *given):
    """Then the product of the operands is not the gradient of the param."""
    return loss({**variables, "params": jax.tree.map(lambda leaf: leaf / 2, variables["params"])}, *given)


def frozen(loss, variables, *given):
    params = {**variables["params"], "first": lax.stop_gradient(variables["params"]["first"])}
    return loss({**variables, "params": params}, *given)


def with_a_gradient_inside(loss, variables, x, weights):
    """A backward pass that is a part of the loss: its weight gradients are no part of those of the loss."""
    constant = lax.stop_gradient(variables["params"])
    slope = jax.grad(lambda x: loss({**variables, "params": constant}, x, weights))(x)
    return loss(variables, x, weights) * (1 + 0 * jnp.sum(lax.stop_gradient(slope)).astype(jnp.float32))


@pytest.mark.filterwarnings("ignore:delayed scaling is differentiated without")
@pytest.mark.parametrize(
    ("change", "left"), [(halved, 0), (frozen, 1), (with_a_gradient_inside, 0)], ids=["halved", "frozen", "inside"]
)
def test_what_operands_do_not_say_is_not_delayed(change, left):
    module = layers.Chain()
    wanted, grads, deferred = differentiate(
        partial(change, weighted_sum(module)), module.init(jax.random.key(1), X), X, WEIGHTS
    )
    assert len(deferred.operands) == left
    jax.tree.map(np.testing.assert_array_equal, jax.jit(add)(grads, deferred), wanted)


def test_under_vmap_nothing_is_delayed():
    module = layers.Chain()
    variables, batch = module.init(jax.random.key(1), X), jnp.stack([X, 2 * X])

    def loss_fn(variables, batch):
        return jnp.sum(jax.vmap(lambda x: module.apply(variables, x))(batch).astype(jnp.float32))

    wanted, grads, deferred = differentiate(loss_fn, variables, batch)
    assert deferred.operands == () and not delayed(grads)
    assert_same_gradients(jax.jit(add)(grads, deferred), wanted)


def test_without_fp8_nothing_is_delayed():
    module = fp8.Dense(FEATURES, recipe=None)
    variables = module.init(jax.random.key(1), X)
    wanted, grads, deferred = differentiate(weighted_sum(module), variables, X, WEIGHTS)
    assert not jax.tree.leaves(deferred)
    assert_same_gradients(add(grads, deferred), wanted)


@pytest.mark.parametrize("recipe", [RECIPE, CURRENT], ids=["delayed", "current"])
def test_four_microbatches_in_a_scan(recipe):
    """Forward and backward of all, and then the weight gradients of all: the operands wait, stacked."""
    module = fp8.Dense(FEATURES, recipe=recipe, param_dtype=jnp.bfloat16)
    variables, loss_fn = module.init(jax.random.key(1), X), weighted_sum(module)
    batches = jnp.stack([X, 2 * X, X[::-1], -X]), jnp.stack([WEIGHTS * i for i in (1, 2, 3, 4)])

    def ordinary(_, batch):
        return None, fp8.value_and_grad(loss_fn)(variables, *batch)[1]

    def first(_, batch):
        _, grads, _, deferred = fp8.value_and_grad(loss_fn, delay_wgrad_compute=True)(variables, *batch)
        return None, (grads, deferred)

    def second(_, left):
        return None, add(*left)

    _, wanted = jax.jit(partial(lax.scan, ordinary, None))(batches)
    _, (grads, deferred) = jax.jit(partial(lax.scan, first, None))(batches)
    _, got = jax.jit(partial(lax.scan, second, None))((grads, deferred))
    assert_same_gradients(got, wanted, 1e-6)
    sums = jax.jit(lambda left: jax.tree.map(lambda leaf: leaf.sum(0), lax.scan(second, None, left)[1]))
    assert_same_gradients(
        sums((grads, deferred)), jax.tree.map(lambda leaf: leaf.sum(0), wanted), 1e-2
    )  # sums in bfloat16
    of_another = jax.tree.map(lambda leaf: leaf[jnp.array([1, 0, 3, 2])], deferred)
    with pytest.raises(AssertionError):
        assert_same_gradients(jax.jit(partial(lax.scan, second, None))((grads, of_another))[1], wanted, 1e-2)


def test_only_fp8_and_scales_are_kept():
    module, rows = fp8.TransformerBlock(4, 128, num_kv_heads=2, activation="swiglu", recipe=RECIPE), 32
    x = weights = jnp.ones((2, 16, 64), jnp.bfloat16)
    run = fp8.value_and_grad(weighted_sum(module), delay_wgrad_compute=True)
    deferred = jax.eval_shape(run, jax.eval_shape(module.init, jax.random.key(1), x), x, weights)[3]
    shapes = [(64, 64 + 32 + 32), (64, 64), (64, 2 * 128), (128, 64)]  # (k, n) of each GEMM
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(deferred))
    assert kept == sum((k + n) * rows for k, n in shapes) + 2 * 4 * len(shapes)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(deferred) if leaf.ndim} == {"float8_e4m3fn", "float8_e5m2"}


def gemm_references(function, *given) -> int:
    return str(jax.make_jaxpr(function)(*given)).count("preferred_element_type=float32")


def test_the_pass_has_no_gemms_of_weight_gradients():
    module = layers.Chain()
    variables, loss_fn = module.init(jax.random.key(1), X), weighted_sum(module)
    ordinary = gemm_references(fp8.value_and_grad(loss_fn), variables, X, WEIGHTS)
    run = fp8.value_and_grad(loss_fn, delay_wgrad_compute=True)
    deferred = jax.eval_shape(run, variables, X, WEIGHTS)[3]
    first, second = gemm_references(run, variables, X, WEIGHTS), gemm_references(fp8.backward_dw, deferred)
    assert first + second == ordinary and second == ordinary // 3 > 0


@pytest.mark.parametrize(("split", "how"), [(("wgrad",), "split"), ((), "fast")])
def test_gemms_accumulate_as_their_recipe_says(split, how, monkeypatch):
    """Which the reference does not show."""
    module, seen = fp8.Dense(FEATURES, recipe=fp8.CurrentScaling(split_accumulator=split)), []
    multiply = passes.matmul
    run = fp8.value_and_grad(weighted_sum(module), delay_wgrad_compute=True)
    deferred = run(module.init(jax.random.key(1), X), X, WEIGHTS)[3]
    monkeypatch.setattr(
        passes, "matmul", lambda *given, **of: seen.append(of["accumulation"]) or multiply(*given, **of)
    )
    fp8.backward_dw(deferred)
    assert seen == [how]


def test_aux_and_keyword_arguments():
    module = layers.Chain()
    variables = module.init(jax.random.key(1), X)

    def loss_fn(variables, x, weights, *, how):
        assert how == "in words"
        return weighted_sum(module)(variables, x, weights), {"size": x.size}

    run = fp8.value_and_grad(loss_fn, has_aux=True, delay_wgrad_compute=True)
    (loss, aux), grads, _, deferred = run(variables, X, weights=WEIGHTS, how="in words")
    wanted = fp8.value_and_grad(weighted_sum(module))(variables, X, WEIGHTS)
    assert aux == {"size": X.size} and float(loss) == float(wanted[0])
    assert_same_gradients(add(grads, deferred), wanted[1])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_arrays_that_are_split(axis_type, shared):
    """Operands lie where the batch does; on an Explicit mesh a layer that is called twice is not delayed."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])
    module = layers.Chain(shared=shared)
    batch = jax.device_put(layers.inputs(rows=32), NamedSharding(mesh, P("data")))
    variables = jax.device_put(module.init(jax.random.key(1), X), NamedSharding(mesh, P()))
    wanted, grads, deferred = differentiate(weighted_sum(module), variables, *batch)
    assert bool(deferred.operands) == (axis_type == AxisType.Auto or not shared)
    assert all(x.values.sharding.spec[-1] == "data" for x, _ in deferred.operands)
    assert_same_gradients(jax.jit(add)(grads, deferred), wanted, 1e-6)


@pytest.mark.parametrize("varying_params", [True, False])
def test_in_a_shard_map(varying_params):
    """Where params do not vary, their gradients are sums over devices, which operands do not say."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    module, batch, counts = layers.Chain(), layers.inputs(rows=32), []
    variables = module.init(jax.random.key(1), X)

    def run(variables, *batch):
        if varying_params:
            variables = vary(variables, frozenset({"data"}))
        _, grads, _, deferred = fp8.value_and_grad(weighted_sum(module), delay_wgrad_compute=True)(variables, *batch)
        counts.append(len(deferred.operands))
        grads = add(grads, deferred)
        return lax.psum(grads, "data") if varying_params else grads

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    wanted = fp8.value_and_grad(weighted_sum(module))(variables, *batch)[1]
    assert_same_gradients(jax.jit(mapped)(variables, *batch), wanted, 1e-5)
    assert set(counts) == {2 if varying_params else 0}


def test_a_mesh_is_refused():
    with pytest.raises(
        ValueError, match=r"delayed on one device, got delay_wgrad_compute=True with parallel=Parallelism.*leave out"
    ):
        fp8.value_and_grad(weighted_sum(layers.Chain()), parallel=hybrid.make_mesh(data=2), delay_wgrad_compute=True)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="delay_wgrad_compute must be True or False, got 'yes'"):
        fp8.value_and_grad(weighted_sum(layers.Chain()), delay_wgrad_compute="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"returned last, got dict; pass the fourth of its results"):
        fp8.backward_dw({})  # type: ignore[arg-type]
