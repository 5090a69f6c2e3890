"""What a pass on every device of a mesh refuses, and what it does with a state."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import SEQ, gpt, make_mesh, run, tokens
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.parallel.mesh import Parallelism

RECIPE = fp8.DelayedScaling(amax_history_len=2)
MODEL = gpt(RECIPE, num_layers=1)
LOSS, TX = fp8.next_token_loss(MODEL), optax.sgd(0.1)
BATCH = tokens(4)
SHAPES = jax.eval_shape(MODEL.init, jax.random.key(0), BATCH[:, :-1])
STATE = jax.eval_shape(lambda: fp8.TrainState.create(variables=jax.tree.map(jnp.zeros_like, SHAPES), tx=TX))


def make(loss_fn=LOSS, recipe=RECIPE, tx=TX, **options):
    return fp8.make_train_step(loss_fn, tx, recipe, **options)


def trace(step, state=STATE, batch=BATCH):
    return step.trace(state, batch)


class Submodel(nn.Module):
    up: str | None = "columns"
    down: str | None = "rows"
    width: int = 32

    @nn.compact
    def __call__(self, x):
        x = fp8.Dense(self.width, recipe=RECIPE, tensor_split=self.up, name="up")(x)
        return fp8.Dense(32, recipe=RECIPE, tensor_split=self.down, name="down")(nn.relu(x))


def of_a_part(variables, x):
    """A loss that applies a model to a part of the variables."""
    parts = {name: tree["model"] for name, tree in variables.items()}
    return jnp.mean(jnp.square(Submodel().apply(parts, x).astype(jnp.float32)))


X = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)


def state_of_a_part():
    variables = Submodel().init(jax.random.key(0), X)
    return fp8.TrainState.create(variables={name: {"model": tree} for name, tree in variables.items()}, tx=TX)


def test_a_loss_of_a_part_of_the_variables():
    """Data and fsdp split what they see; `tensor` must know each param by its path."""
    states, losses = run(make(of_a_part), state_of_a_part(), X)
    for axis in ("data", "fsdp"):
        step = make(of_a_part, parallel=make_mesh(**{axis: 2}))
        on_mesh, own_losses = run(step, step.place(state_of_a_part(), X), X)
        np.testing.assert_allclose(own_losses, losses, 1e-5)
        jax.tree.map(lambda got, wanted: np.testing.assert_allclose(got, wanted, 1e-3, 1e-5), on_mesh[0], states[0])
    with pytest.raises(ValueError, match="must be at its path in the params, got up/kernel, which is not there; ap"):
        trace(make(of_a_part, parallel=make_mesh(tensor=2)), state_of_a_part(), X)


def with_cache():
    variables = MODEL.init(jax.random.key(0), BATCH[:, :-1])
    return fp8.TrainState.create(variables=variables | {"fp8_cache": fp8.cast_weights(variables, RECIPE)}, tx=TX)


class BesideLogits(nn.Module):
    """A param that every device has whole, after the logits, which all devices have alike."""

    @nn.compact
    def __call__(self, tokens):
        return gpt(RECIPE, num_layers=1)(tokens) * self.param("temperature", nn.initializers.ones, ())


def beside_logits(variables, batch):
    return fp8.next_token_loss(BesideLogits())(variables, batch)


def state_beside_logits():
    variables = jax.eval_shape(BesideLogits().init, jax.random.key(0), BATCH[:, :-1])
    return jax.eval_shape(lambda: fp8.TrainState.create(variables=jax.tree.map(jnp.zeros_like, variables), tx=TX))


def trace_layers(**fields):
    model = Submodel(**fields)

    def loss_fn(variables, x):
        return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32)))

    state = fp8.TrainState.create(variables=model.init(jax.random.key(0), X), tx=TX)
    return trace(make(loss_fn, parallel=make_mesh(tensor=2)), state, X)


WHOLE_EMBEDDING = (("^embedding", P()),)
SEQUENCE = fp8.Parallelism(make_mesh(tensor=2), sequence_parallel=True)
REFUSED = {
    "rows": (
        lambda: trace(make(parallel=make_mesh(data=4), microbatches=2), batch=BATCH),
        "as many rows in each of 2 microbatches: 4 parts of a batch on the mesh data=4, got 4 rows of batch; pass",
    ),
    "a cache beside split params": (
        lambda: trace(make(parallel=make_mesh(fsdp=2)), jax.eval_shape(with_cache)),
        "must have whole params on every device, got a step on fsdp=2; leave fp8_cache out of the variables: the step",
    ),
    "sequence": (
        lambda: trace(make(parallel=SEQUENCE), batch=tokens(4, SEQ - 1)),
        r"tensor=2 needs sequences that it divides, got tokens \(4, 31\); pad the sequence, or leave",
    ),
    "sequence without an embedding that splits rows": (
        lambda: trace(make(of_a_part, parallel=SEQUENCE), state_of_a_part(), X),
        "needs a model whose embedding splits rows, as fp8.GPT's does, got a loss without one; leave sequence_parallel",
    ),
    "sequence and layers of others": (
        lambda: trace(make(beside_logits, parallel=SEQUENCE), state_beside_logits()),
        "and knows it of fp8.GPT alone, got also the param temperature; leave sequence_parallel out, or this param",
    ),
    "columns alone": (
        lambda: trace_layers(down=None),
        "down: a layer split by rows must follow one split by columns, .* got 16 features of the input and 32 rows of",
    ),
    "rows alone": (lambda: trace_layers(up=None), "got 32 features of the input and 16 rows of the kernel on each"),
    "few features on each device": (
        lambda: trace_layers(width=16),
        "up: FP8 needs out features divisible by 16 on each device of tensor=2, got 8; pad them",
    ),
    "an embedding left whole": (
        lambda: trace(make(parallel=fp8.Parallelism(make_mesh(tensor=2), WHOLE_EMBEDDING))),
        "embedding must be split over tensor=2, but is whole on every device; leave it out of the rules",
    ),
    "queries left whole": (
        lambda: trace(make(parallel=fp8.Parallelism(make_mesh(tensor=2), [("query/", P())]))),
        "attention/query/kernel must be split over tensor=2, but is whole on every device",
    ),
    "start of a state that lies elsewhere": (
        lambda: make(parallel=make_mesh(data=2)).start(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), STATE)),
        "must lie on the 2 devices of the step's mesh, got state.* on 1; make it with",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"fsdp": 2}], ids=str)
def test_the_loss_of_a_state_on_a_mesh(axis_type, axes):
    """Evaluation by `jax.jit`, outside of the step, of params that are split."""
    (name,) = axes
    mesh = jax.make_mesh((2,), (name,), axis_types=(axis_type,), devices=jax.devices()[:2])
    step = make(parallel=mesh)
    state = step.init_state(MODEL.init, jax.random.key(0), jnp.asarray(BATCH[:, :-1]))
    batch = Parallelism(mesh).place_batch(BATCH, 1)
    of_one = MODEL.init(jax.random.key(0), BATCH[:, :-1])
    np.testing.assert_allclose(jax.jit(LOSS)(state.variables, batch), jax.jit(LOSS)(of_one, BATCH), 2e-3)


def test_a_state_that_lies_on_one_device_is_refused():
    step = make(of_a_part, parallel=make_mesh(data=2))
    with pytest.raises(
        ValueError, match=r"must lie on the 2 devices of the step's mesh, got state.* on 1; make it with"
    ):
        step(state_of_a_part(), X)


def test_a_loss_that_reads_a_kernel_beside_its_layer_is_not_a_number_with_fsdp():
    """A kernel that GEMMs read in FP8 is not gathered, and what stands in its place cannot be taken for it."""

    def penalty(variables, x):
        loss = jnp.mean(jnp.square(Submodel().apply(variables, x).astype(jnp.float32)))
        return loss + jnp.sum(jnp.square(variables["params"]["up"]["kernel"]))

    variables = Submodel().init(jax.random.key(0), X)
    for axis, is_number in (("fsdp", False), ("data", True)):
        step = make(penalty, parallel=make_mesh(**{axis: 2}), warm_start=False)
        state = step.place(fp8.TrainState.create(variables=variables, tx=TX), X)
        assert np.isfinite(run(step, state, X, steps=1)[1][0]) == is_number
