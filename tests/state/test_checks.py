"""What training refuses: arguments in each other's places, what does not belong together, and empty batches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_fp8 as fp8

pytestmark = pytest.mark.versions

RECIPE = fp8.DelayedScaling(amax_history_len=2)
MODULE = fp8.Dense(16, recipe=RECIPE)
X = jnp.ones((16, 16))
VARIABLES = MODULE.init(jax.random.key(0), X)
TX, ADAM = fp8.fused_adamw(1e-3), optax.adamw(1e-3)


def loss_fn(variables, x):
    return jnp.mean(jnp.square(MODULE.apply(variables, x).astype(jnp.float32)))


def state(tx=TX, **changes):
    return fp8.TrainState.create(variables=jax.tree.map(jnp.copy, VARIABLES), tx=tx).replace(**changes)


def make(loss_fn=loss_fn, tx=TX, recipe=RECIPE, *args, **options):
    return fp8.make_train_step(loss_fn, tx, recipe, *args, **options)


def trace(loss_fn=loss_fn, batch=X, **options):
    return make(loss_fn, **options).trace(state(), batch)


class TwoLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return fp8.Dense(16, recipe=RECIPE, name="last")(fp8.Dense(32, recipe=RECIPE, name="first")(x))


OTHER = TwoLayers().init(jax.random.key(0), X)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TX, loss_fn, RECIPE), r"loss_fn must be a function of \(variables, batch\), got an optimizer; swap the arg"),
        (
            (loss_fn, optax.adamw, RECIPE),
            r"tx must be an optax.*, got the function adamw; call it, as in optax.adamw\(",
        ),
        ((loss_fn, fp8.fused_adamw, RECIPE), "tx must be .*, got the function fused_adamw; call it"),
        ((loss_fn, RECIPE, TX), "tx must be an optax.GradientTransformation, got a DelayedScaling; pass fused_adamw"),
        ((loss_fn, None, RECIPE), "tx must be an optax.GradientTransformation, got None"),
        ((loss_fn, 1e-3, RECIPE), "tx must be an optax.GradientTransformation, got a float"),
        ((MODULE, TX, RECIPE), r"loss_fn must be .*, got a Dense, a model; pass next_token_loss\(model\)"),
        ((fp8.GPT, TX, RECIPE), "loss_fn must be .*, got the class GPT, a model; pass"),
        ((None, TX, RECIPE), "loss_fn must be a function .*, got None"),
        ((jnp.float32(1), TX, RECIPE), r"loss_fn must be a function .*, got float32\[\]"),
        ((loss_fn, TX, fp8.DelayedScaling), r"recipe must be DelayedScaling\(...\), .*, got <class"),
        ((loss_fn, TX, TX), r"recipe must be .*, got a GradientTransformationExtraArgs$"),
        ((loss_fn, TX, RECIPE, 2.0), "microbatches must be an integer of at least 1, got 2.0; pass 2"),
        ((loss_fn, TX, RECIPE, True), "microbatches must be an integer of at least 1, got True"),
        ((loss_fn, TX, RECIPE, "2"), "microbatches must be an integer of at least 1, got '2'"),
        ((loss_fn, TX, RECIPE, None), "microbatches must be an integer of at least 1, got None"),
    ],
)
def test_arguments_of_make_train_step(arguments, message):
    with pytest.raises(ValueError, match=message):
        fp8.make_train_step(*arguments)


@pytest.mark.parametrize("option", ["cache_weights", "warm_start", "donate", "has_aux"])
def test_options_are_true_or_false(option):
    with pytest.raises(ValueError, match=f"{option} must be True or False, got 'no'"):
        make(**{option: "no"})


def test_compiler_options_are_named():
    with pytest.raises(ValueError, match="compiler_options must be a dict or None, got 'fast'"):
        make(compiler_options="fast")


ENTRIES = {
    "a step": lambda step, state, pending: step(state, X),
    "diagnose": lambda step, state, pending: step.diagnose(state, X),
    "warm_start": lambda step, state, pending: step.warm_start(state, X),
    "place": lambda step, state, pending: step.place(state, X),
    "start": lambda step, state, pending: step.start(state),
    "accumulate_step": lambda step, state, pending: step.accumulate_step(state, pending, X, True),
    "apply_step": lambda step, state, pending: step.apply_step(state, pending),
}


@pytest.mark.parametrize("enter", ENTRIES.values(), ids=ENTRIES)
def test_a_state_that_a_step_has_taken(enter):
    """Whichever of its arrays are gone: the step count is no more than one of them."""
    step, given = make(), state()
    step.warm_start(given, X)
    partly = state(step=given.step).replace(params=given.params)
    pending = step.start(other := state())
    for taken in (given, partly):
        with pytest.raises(ValueError, match="got one that a step has taken; use the new one"):
            enter(step, taken, pending)
    enter(step, other, pending)


def test_another_error_is_not_taken_for_a_state_that_is_gone():
    def fail(*_):
        raise RuntimeError("of its own")

    tx = optax.GradientTransformation(optax.sgd(0.1).init, fail)
    with pytest.raises(RuntimeError, match="of its own"):
        make(tx=tx)(given := state(tx=tx), X)
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_sums_that_a_microbatch_has_taken():
    step, given = make(), state()
    first = step.start(given)
    second = step.accumulate_step(given, first, X, True)
    for enter in (ENTRIES["accumulate_step"], ENTRIES["apply_step"]):
        with pytest.raises(ValueError, match=r"pending must be what the last .* got one that another call has taken"):
            enter(step, given, first)
    step.apply_step(given, second)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda loss: (loss, {}), "loss_fn must return a scalar, got a tuple; return the loss alone, or pass has_aux"),
        (
            lambda loss: jnp.stack([loss, loss]),
            r"loss_fn must return a floating point scalar, got float32\[2\]; return",
        ),
        (lambda loss: jnp.int32(1), r"loss_fn must return a floating point scalar, got int32\[\]"),
        (lambda loss: None, "loss_fn must return a floating point scalar, got None"),
    ],
)
def test_what_a_loss_returns(returned, message):
    def wrong(variables, x):
        return returned(loss_fn(variables, x))

    with pytest.raises(ValueError, match=message):
        trace(wrong)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(fp8.value_and_grad(wrong), VARIABLES, X)


def test_a_loss_with_aux():
    with pytest.raises(
        ValueError, match=r"loss_fn must return \(loss, aux\) with has_aux=True, got float32\[\]; return"
    ):
        fp8.value_and_grad(loss_fn, has_aux=True)(VARIABLES, X)
    with pytest.raises(ValueError, match=r"loss_fn must be .*, got a Dense, a model"):
        fp8.value_and_grad(MODULE)
    with pytest.raises(ValueError, match=r"loss_fn must be .*, got a Dense, a model"):
        fp8.warm_start(MODULE, RECIPE)
    with pytest.raises(ValueError, match=r"recipe must be .*, got 'delayed'"):
        fp8.warm_start(loss_fn, "delayed")


@pytest.mark.parametrize(
    ("batch", "microbatches", "message"),
    [
        (X[:0], 1, r"a batch must have at least one row, got batch of shape \(0, 16\); leave empty batches out"),
        (X[:0], 2, r"a batch must have at least one row, got batch of shape \(0, 16\)"),
        ({"x": X, "y": X[:0]}, 1, r"at least one row, got batch\['y'\] of shape \(0, 16\)"),
        ((X, jnp.float32(1)), 2, r"microbatches are parts of arrays, got batch\[1\], a scalar; give it a leading dim"),
        ((X, X[:8]), 2, r"must have one leading dim to be split, got 16 of batch\[0\] and 8 of batch\[1\]; pad"),
    ],
)
def test_batches(batch, microbatches, message):
    with pytest.raises(ValueError, match=message):
        trace(lambda variables, batch: loss_fn(variables, X), batch, microbatches=microbatches)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda step: step(VARIABLES, X), "state must be a TrainState, got a dict with 'params', 'fp8'; call step"),
        (
            lambda step: step(X, state()),
            r"state must be a TrainState, got float32\[16, 16\]; call step\(state, batch\)",
        ),
        (lambda step: step.lower(X, state()), r"state must be a TrainState, got float32\[16, 16\]"),
        (lambda step: step.start(VARIABLES), "state must be a TrainState, got a dict"),
        (
            lambda step: step.accumulate_step(state(), state(), X, True),
            "pending must be a PendingStep, got a TrainState",
        ),
        (lambda step: step.accumulate_step(state(), None, X, True), "pending must be a PendingStep, got None"),
        (lambda step: step.apply_step(state(), None), "pending must be a PendingStep, got None; pass what start"),
        (lambda step: step.apply_step(step.start(state()), state()), "state must be a TrainState, got a PendingStep"),
    ],
)
def test_states(call, message):
    with pytest.raises(ValueError, match=message):
        call(make(microbatches=2))


@pytest.mark.parametrize(
    ("tx", "made_by", "difference"),
    [
        (TX, ADAM, "the tree must be a FusedAdamState, got a tuple"),
        (ADAM, TX, "the tree must be a tuple, got a FusedAdamState"),
        (optax.chain(optax.clip(1.0), TX), TX, "the tree must be a tuple, got a FusedAdamState"),
        (
            optax.sgd(1e-3, momentum=0.9),
            ADAM,
            r"\[2\] does not belong there",
        ),
        (optax.adam(1e-3), optax.sgd(1e-3), r"\[0\] must be a ScaleByAdamState, got a EmptyState"),
    ],
)
def test_another_optimizers_state(tx, made_by, difference):
    """Of the last, Optax made a step: it gave back the state that it was given."""
    message = (
        rf"state.opt_state must be that of the step's optimizer, but ({difference}); make the state with TrainState"
    )
    for call in (lambda step: step.trace(state(made_by), X), lambda step: step.start(state(made_by))):
        with pytest.raises(ValueError, match=message):
            call(make(tx=tx))


def test_params_of_another_model():
    difference = r"\.mu\['bias'\] is missing|\.mu\['first'\] is missing"
    with pytest.raises(ValueError, match=rf"must be that of the step's optimizer, but ({difference})"):
        make().trace(state(params=OTHER["params"]), X)


def test_a_pending_step_of_another_model():
    step = make(lambda variables, x: jnp.mean(TwoLayers().apply(variables, x).astype(jnp.float32)), microbatches=2)
    pending = step.start(fp8.TrainState.create(variables=OTHER, tx=TX))
    message = (
        r"pending must be of this state, but of its gradients \['bias'\] is missing, \['first'\] is new; pass what"
    )
    for call in (
        lambda step: step.accumulate_step(state(), pending, X, True),
        lambda step: step.apply_step(state(), pending),
    ):
        with pytest.raises(ValueError, match=message):
            call(make(microbatches=2))


def test_an_optimizer_that_changes_the_type_of_its_state():
    """Optax's moments of bfloat16 params are bfloat16 until float32 gradients come: no branch of a program."""
    module = fp8.Dense(16, recipe=None, param_dtype=jnp.bfloat16)
    plain = fp8.TrainState.create(variables=module.init(jax.random.key(0), X), tx=ADAM)

    def loss(variables, x):
        return jnp.mean(module.apply(variables, x).astype(jnp.float32))

    step = make(loss, ADAM, None, 2)
    pending = step.accumulate_step(plain, step.start(plain), X, True)
    message = r"must keep the types of its state, but .*\.mu\['bias'\] must be bfloat16\[16\], got float32\[16\]; keep"
    with pytest.raises(ValueError, match=message):
        step.apply_step(plain, pending)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((VARIABLES, fp8.fused_adamw), "tx must be an optax.GradientTransformation, got the function fused_adamw"),
        ((VARIABLES, optax.adamw), "tx must be an optax.GradientTransformation, got the function adamw; call it"),
        (
            ({"params": {}, "fp8": None}, TX),
            r'variables\["fp8"\] must be a dict, got None; leave out collections without',
        ),
        ((MODULE, TX), 'variables must be a dict with "params", got a Dense; pass what model.init returned'),
        ((TX, VARIABLES), 'variables must be a dict with "params", got a GradientTransformationExtraArgs'),
    ],
)
def test_arguments_of_a_train_state(arguments, message):
    variables, tx = arguments
    with pytest.raises(ValueError, match=message):
        fp8.TrainState.create(variables=variables, tx=tx)


def cached():
    return state(cache=fp8.cast_weights(VARIABLES, RECIPE))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cached().replace(params=OTHER["params"]), "params must have the kernel kernel of a GEMM .*, got None"),
        (
            lambda: cached().replace(fp8={}),
            "the FP8 state must have the scale of .*, which the weight cache holds, got an",
        ),
        (lambda: fp8.cast_weights(RECIPE, VARIABLES), 'variables must be a dict with "params", got a DelayedScaling'),
        (lambda: fp8.cast_weights(VARIABLES, "delayed"), "recipe must be .*, got 'delayed'"),
        (
            lambda: fp8.cast_weights(VARIABLES, fp8.CurrentScaling()),
            "must know which layers are in FP8, and CurrentScaling leaves no trace .*, got neither a cache nor forward",
        ),
        (
            lambda: fp8.cast_weights({"fp8": VARIABLES["fp8"]}, RECIPE),
            'needs a recipe and "params", with DelayedScaling also "fp8".*, got a dict with \'fp8\'',
        ),
        (
            lambda: fp8.cast_weights({"params": OTHER["params"], "fp8": VARIABLES["fp8"]}, RECIPE),
            "params must have the kernel kernel of a GEMM in the FP8 state or cache, got None; pass params and",
        ),
        (
            lambda: fp8.cast_weights(VARIABLES, RECIPE, fp8.cast_weights(OTHER, RECIPE)),
            r"cache must be what cast_weights made of this .*, but \['kernel'\] is missing, \['first'\] is new; make",
        ),
    ],
)
def test_weight_caches(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_step_does_not_cut_integers():
    wide, step = np.full((16, 16), 2**40), make()
    calls = [
        lambda: step(state(), wide),
        lambda: step.diagnose(state(), wide),
        lambda: step.warm_start(state(), wide),
        lambda: step.accumulate_step(state(), step.start(state()), wide, True),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"integers of at most 32 bits, .* those of int64, got 1099511627776"):
            call()
