"""A GPT trained with dropout: its masks change from step to step, and nothing but training drops."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8

SHAPE = {"vocab_size": 64, "num_heads": 4, "hidden_size": 64, "max_seq_len": 32}
TOKENS = jax.random.randint(jax.random.key(0), (4, 17), 0, 64)
RECIPE = fp8.DelayedScaling(amax_history_len=4)
RNGS = {"dropout": jax.random.key(1)}


def gpt(rate=0.3, of="dropout_rate", layers=1, **fields):
    return fp8.GPT(fp8.GPTConfig(**SHAPE | {"num_layers": layers, of: rate}), **{"recipe": RECIPE, **fields})


@cache
def first_params():
    return {"params": jax.jit(gpt(recipe=None).init)(jax.random.key(2), TOKENS[:, :-1])["params"]}


@cache
def trained(seed, rate, learning_rate, of_model, options):
    """A step, and a state to begin with; programs are made once for all tests that want the same."""
    model, tx, rngs = gpt(rate, **dict(of_model)), fp8.fused_adamw(learning_rate), None
    if seed is not None:
        rngs = {"dropout": jax.random.key(seed)}
    step = fp8.make_train_step(
        fp8.next_token_loss(model), tx, model.recipe, rngs=rngs, warm_start=False, **dict(options)
    )
    if model.recipe is None:
        return step, step.place(fp8.TrainState.create(variables=first_params(), tx=tx), TOKENS)
    return step, step.init_state(model.init, jax.random.key(2), TOKENS[:, :-1])


def losses(steps=3, seed=1, rate=0.3, learning_rate=3e-3, state=None, of_model=None, **options):
    step, start = trained(seed, rate, learning_rate, tuple((of_model or {}).items()), tuple(options.items()))
    state = jax.tree.map(jnp.copy, start) if state is None else state
    found = []
    for _ in range(steps):
        state, metrics = step(state, TOKENS)
        found.append(float(metrics["loss"]))
    return found, state


EXACT = {"recipe": None, "dtype": jnp.float32}
STILL = {"learning_rate": 0.0, "of_model": EXACT, "seed": 2}


def test_it_learns_and_every_step_has_its_masks():
    with_dropout, without = losses(20)[0], losses(20, seed=None, rate=0.0)[0]
    assert with_dropout[-1] < with_dropout[0] - 0.5
    assert np.mean(with_dropout[-5:]) > np.mean(without[-5:]) + 0.05  # it is harder
    found = losses(**STILL)[0]
    assert len({*found}) == 3 and np.std(found) > 1e-3
    assert np.std(losses(rate=0.0, **STILL | {"seed": None})[0]) < 1e-6  # negative control: one mask in every step


def test_a_run_that_goes_on_has_the_masks_of_one_that_did_not_end():
    whole, _ = losses(4)
    first, state = losses(2)
    assert first + losses(2, state=state)[0] == whole
    assert losses(2, state=losses(2)[1], seed=9)[0] != whole[2:]


@pytest.mark.parametrize("remat", ["norms", "full"])
def test_a_forward_that_is_computed_again_has_its_masks(remat):
    expected = losses()[0]
    assert losses(of_model={"remat": remat})[0] == pytest.approx(expected, rel=2e-3)
    assert losses(seed=9)[0] != pytest.approx(expected, rel=2e-3)  # negative control


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"data": 2, "fsdp": 2}, {"sequence": 2}], ids=str)
def test_on_a_mesh(axes):
    """Over `tensor` alone all devices have the masks of one; elsewhere there are others, as with another key."""
    sizes = {"tensor" if axis == "sequence" else axis: size for axis, size in axes.items()}
    devices = jax.devices()[: int(np.prod([*sizes.values()]))]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices)
    options = {"parallel": fp8.Parallelism(mesh, sequence_parallel="sequence" in axes)}
    found = losses(10, **options)[0]
    assert np.mean(found) == pytest.approx(np.mean(losses(10)[0]), rel=0.05) and found[-1] < found[0] - 0.2
    found, expected = losses(**STILL, **options)[0], losses(**STILL)[0]
    differences = np.abs(np.subtract(found, expected))
    print("DIFF", differences)
    assert (differences < 2e-5).all() if "tensor" in axes else (differences > 1e-4).all()


def test_nothing_but_training_drops():
    model, plain = gpt(), gpt(0.0)
    variables = jax.jit(model.init)(jax.random.key(2), TOKENS)
    np.testing.assert_array_equal(*(jax.jit(of.apply)(variables, TOKENS) for of in (model, plain)))
    evaluated = jax.jit(fp8.next_token_loss(model, deterministic=True))(variables, TOKENS)
    assert evaluated == jax.jit(fp8.next_token_loss(plain))(variables, TOKENS)
    assert evaluated != jax.jit(fp8.next_token_loss(model))(variables, TOKENS, rngs=RNGS)
    written = [fp8.generate(of, variables, TOKENS[:, :4], max_new_tokens=4) for of in (model, plain)]
    jax.tree.map(np.testing.assert_array_equal, *written)


def test_a_loop_of_ones_own():
    model = gpt(layers=2, **EXACT)
    variables, loss_fn = jax.jit(model.init)(jax.random.key(2), TOKENS), jax.jit(fp8.next_token_loss(model))
    loss, grads, _ = jax.jit(fp8.value_and_grad(loss_fn))(variables, TOKENS, rngs=RNGS)
    assert float(loss) == pytest.approx(float(loss_fn(variables, TOKENS, rngs=RNGS)), rel=1e-4)
    leaf = variables["params"]["layer_0"]["mlp"]["up"]["kernel"]
    direction = jax.random.normal(jax.random.key(3), leaf.shape)

    def along(step, rngs=RNGS):
        params = jax.tree.map(lambda p: p + step * direction if p is leaf else p, variables["params"])
        return float(loss_fn({"params": params}, TOKENS, rngs=rngs))

    slope = float(jnp.vdot(grads["layer_0"]["mlp"]["up"]["kernel"], direction))
    assert slope == pytest.approx((along(1e-2) - along(-1e-2)) / 2e-2, rel=0.03)
    other = {"dropout": jax.random.key(9)}  # negative control: the slope under other masks
    assert slope != pytest.approx((along(1e-2, other) - along(-1e-2, other)) / 2e-2, rel=0.06)


WEIGHTS = {"of": "attention_dropout_rate"}


def test_weights_of_attention():
    """Of every step other ones, and the same again under remat; on a mesh with heads split, there are others."""
    exact = {"of_model": {**WEIGHTS, **EXACT}, "learning_rate": 0.0}
    alone = losses(**exact)[0]
    assert len({*alone}) == 3 and np.std(alone) > 1e-4
    assert losses(of_model={**WEIGHTS, "remat": "full"})[0] == pytest.approx(losses(of_model=WEIGHTS)[0], rel=2e-3)
    found = losses(20, of_model=WEIGHTS)[0]
    assert found[-1] < found[0] - 0.5
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    on_mesh = losses(**exact, parallel=mesh)[0]
    assert (np.abs(np.subtract(on_mesh, alone)) > 1e-5).all() and on_mesh == pytest.approx(alone, rel=0.05)
    with pytest.raises(ValueError, match=r"a GPT with attention_dropout_rate=0.3 needs a random stream"):
        losses(seed=None, of_model=WEIGHTS)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"dropout_rate=0.3 needs a random stream in training, got none; pass rngs="):
        losses(seed=None)
    with pytest.raises(ValueError, match="a loss whose layers keep activations on the host runs layers one by one"):
        losses(of_model={"remat": "offload:1"})
    pipe = jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="a pipeline runs layers one by one and passes them no keys, got rngs"):
        losses(parallel=pipe, microbatches=2, of_model={"layers": 2})
    with pytest.raises(ValueError, match=r"run layers one by one, without dropout, got dropout_rate=0.3; use another"):
        losses(seed=None, parallel=pipe, microbatches=2, of_model={"layers": 2})
