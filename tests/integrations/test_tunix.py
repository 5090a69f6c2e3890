"""The train step for Tunix's trainers, with a stand-in for them; tests/hosts/tunix_check.py has the real ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from nnx_layers import MLP, RECIPE, X, assert_same, loss, make, values

import jax_fp8 as fp8
import jax_fp8.nnx
from jax_fp8.integrations.tunix import in_fp8, warm_start

pytestmark = pytest.mark.versions


class PeftTrainer:
    """What the step of Tunix's trainer needs."""

    _has_aux = False
    _lora_enabled = False

    def __init__(self, model, optimizer):
        kind = nnx.LoRAParam if self._lora_enabled else nnx.Param
        self.model, self.optimizer = model, nnx.Optimizer(model, optimizer, wrt=kind)

    def loss_fn(self, model, x):
        return (loss(model, x), {"rows": len(x)}) if self._has_aux else loss(model, x)

    def gen_model_input_fn(self, inputs):
        return {"x": inputs}

    def _train_step(self, model, optimizer, inputs):
        raise NotImplementedError

    def train(self, batches):
        step = nnx.jit(self._train_step)
        return [step(self.model, self.optimizer, batch) for batch in batches]


class Derived(PeftTrainer):
    _has_aux = True


def batches(steps):
    return [X * (1 + number) for number in range(steps)]


def by_hand(steps, microbatches=1):
    """The same steps in a loop of one's own."""
    model = make()
    fp8.nnx.warm_start(loss)(model, batches(1)[0])
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = []
    for first in range(0, steps, microbatches):
        total = None
        for x in batches(steps)[first : first + microbatches]:
            value, grads = nnx.jit(fp8.nnx.value_and_grad(loss))(model, x)
            losses.append(float(value))
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        optimizer.update(model, jax.tree.map(lambda leaf: leaf / microbatches, total))
        fp8.nnx.update_state(model)
    return losses, model


@pytest.mark.parametrize("cls", [PeftTrainer, Derived])
def test_a_step_is_that_of_a_loop_of_ones_own(cls):
    trainer = in_fp8(cls)(make(), optax.adam(1e-2))
    assert isinstance(trainer, cls) and type(trainer).__name__ == f"Fp8{cls.__name__}"
    warm_start(trainer, batches(1)[0])
    results = trainer.train(batches(4))
    expected, model = by_hand(4)
    np.testing.assert_allclose([float(value) for value, _, _ in results], expected, rtol=1e-6)
    assert all(norm > 0 for _, _, norm in results)
    assert [aux for _, aux, _ in results] == [{"rows": 64} if cls is Derived else None] * 4
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), values(trainer.model), values(model)
    )


def test_with_accumulation_the_scales_are_those_of_a_whole_step():
    trainer = in_fp8(PeftTrainer)(make(), optax.MultiSteps(optax.adam(1e-2), 2))
    warm_start(trainer, batches(1)[0])
    trainer.train(batches(4))
    _, model = by_hand(4, microbatches=2)
    found, expected = fp8.nnx.fp8_state(trainer.model), fp8.nnx.fp8_state(model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), found, expected)
    assert (np.asarray(found["first"]["amax_history"][0]) > 0).sum() == 2 + 1  # two steps, and the warm start
    assert not np.array_equal(found["first"]["amax_history"], fp8.nnx.fp8_state(by_hand(4)[1])["first"]["amax_history"])


def test_adapters_alone_are_trained():
    class WithAdapters(PeftTrainer):
        _lora_enabled = True

    model = MLP(nnx.Rngs(0), recipe=RECIPE, lora=fp8.Lora(rank=4))
    fp8.nnx.freeze_kernels(model)
    biases = np.asarray(model.first.bias[...])
    trainer = in_fp8(WithAdapters)(model, optax.adam(3e-2))
    warm_start(trainer, X)
    results = trainer.train([X] * 6)
    assert float(results[-1][0]) < float(results[0][0])
    assert_same(model.first.bias[...], biases)
    assert np.any(model.first.lora_b[...])


def test_what_is_refused():
    class OwnStep(PeftTrainer):
        def _train_step(self, model, optimizer, inputs):
            return None

    with pytest.raises(ValueError, match="needs the train step of PeftTrainer, got OwnStep, which has its own; use a"):
        in_fp8(OwnStep)
    for other in (MLP, PeftTrainer(make(), optax.adam(1e-2)), 3):
        with pytest.raises(ValueError, match="needs a trainer class of Tunix, which derives from PeftTrainer, got"):
            in_fp8(other)
