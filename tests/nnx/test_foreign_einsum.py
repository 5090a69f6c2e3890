"""Layers of other libraries that are an einsum of one param are converted; those that are more, or less, are left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nnx_layers import RECIPE, RECIPES

import jax_fp8 as fp8
import jax_fp8.nnx

pytestmark = pytest.mark.versions


class Theirs(nnx.Module):
    """An einsum layer as other libraries have it."""

    def __init__(self, einsum_str, shape, rngs, dtype=jnp.float32):
        self.einsum_str, self.shape, self.dtype = einsum_str, shape, dtype
        self.w = nnx.Param(jax.random.normal(rngs.params(), shape) / 6)

    def __call__(self, x):
        return jnp.einsum(self.einsum_str, x.astype(self.dtype), self.w.get_value().astype(self.dtype))


class Indexed(Theirs):
    """Without a cast, and reading the param in the other way."""

    def __call__(self, x):
        return jnp.einsum(self.einsum_str, x, self.w[...])


class Doubled(Theirs):
    """Looks the same, and computes something else."""

    def __call__(self, x):
        return 2 * super().__call__(x)


class Transposed(Theirs):
    """Another einsum than it says, of the same shapes."""

    def __call__(self, x):
        return jnp.einsum("BTD,HD->BTH", x.astype(self.dtype), self.w.get_value().astype(self.dtype))


class Asking(Theirs):
    """Wants another argument."""

    def __call__(self, x, scale):
        return scale * super().__call__(x)


class Adapted(Theirs):
    """Has an adapter, as qwix adds them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.w_lora_a = nnx.LoRAParam(jnp.ones((32, 4)))


class Model(nnx.Module):
    def __init__(self, cls=Theirs, seed=0):
        rngs = nnx.Rngs(seed)
        self.q = cls("BTD,NDH->BTNH", (2, 32, 16), rngs)
        self.o = cls("BTNH,NHD->BTD", (2, 16, 32), rngs)
        self.table = nnx.Embed(48, 32, rngs=rngs)
        self.norm = nnx.RMSNorm(32, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens)
        return self.table.attend(x + self.o(jax.nn.relu(self.q(self.norm(x)))))


TOKENS = jax.random.randint(jax.random.key(0), (2, 16), 0, 48)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("cls", [Theirs, Indexed])
def test_an_einsum_of_one_param_is_converted(cls, recipe):
    model = Model(cls)
    expected, param = np.asarray(model(TOKENS)), model.q.w
    before = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    result = fp8.nnx.convert(model, recipe)
    assert sorted(result.converted) == ["o", "q"]
    assert dict(result.left) == {"table": "its class is Embed, none that convert knows"}
    assert model.q.w is param and model.q.shape == (2, 32, 16) and isinstance(model.q, fp8.nnx.Einsum)
    assert [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))] == before
    found = np.asarray(model(TOKENS))
    assert 0 < np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)
    again = fp8.nnx.convert(model, recipe)
    assert again.converted == () and sorted(again.left) == ["table"]


@pytest.mark.parametrize("cls", [Doubled, Transposed, Asking, Adapted])
def test_what_is_another_call_is_left(cls):
    shape = (32, 32) if cls is Transposed else (32, 48)
    model = nnx.Sequential(cls("BTD,DH->BTH", shape, nnx.Rngs(0)), Theirs("BTD,DH->BTH", shape, nnx.Rngs(0)))
    result = fp8.nnx.convert(model, RECIPE)
    assert result.converted == ("layers/1",)
    reason = (
        "with the variables w, w_lora_a and not one param" if cls is Adapted else "whose call is another one than its"
    )
    assert f"its class is {cls.__name__}, {reason}" in result.left["layers/0"]


class Derived(nnx.Einsum):
    """Of Flax's class, and somebody else's."""

    def __call__(self, x):
        return 2 * super().__call__(x)


def test_a_class_derived_from_that_of_flax_is_left():
    model = nnx.Sequential(Derived("BTD,DH->BTH", (32, 48), rngs=nnx.Rngs(0)))
    result = fp8.nnx.convert(model, RECIPE)
    assert result.converted == () and dict(result.left) == {"layers/0": "its class is Derived, none that convert knows"}


@pytest.mark.parametrize("cls", [Theirs, Indexed])
@pytest.mark.parametrize("strict", [False, True])
def test_the_result_keeps_its_dtype(cls, strict):
    """One casts to its `dtype`; the other has the attribute, and computes in the dtypes of its operands."""
    model = nnx.Sequential(cls("BTD,DH->BTH", (32, 48), nnx.Rngs(0), jnp.bfloat16))
    x = jnp.ones((2, 16, 32), jnp.bfloat16)
    expected = model(x).dtype
    assert expected == (jnp.bfloat16 if cls is Theirs else jnp.float32)
    with jax.numpy_dtype_promotion("strict" if strict else "standard"):
        assert fp8.nnx.convert(model, RECIPE).converted == ("layers/0",)
    assert model(x).dtype == expected


def test_reasons():
    class Several(nnx.Module):
        def __init__(self, rngs):
            self.experts = Theirs("ECD,EDH->ECH", (2, 32, 32), rngs)
            self.narrow = Theirs("BTD,DH->BTH", (32, 10), rngs)
            self.flax = nnx.Einsum("BTD,NDH->BTNH", (2, 32, 16), (2, 16), rngs=rngs)
            self.linear = nnx.Linear(32, 32, rngs=rngs)
            self.precise = nnx.Einsum("BTD,DH->BTH", (32, 32), precision="highest", rngs=rngs)
            self.convolution = nnx.Conv(32, 32, (3,), rngs=rngs)

    result = fp8.nnx.convert(Several(nnx.Rngs(0)), RECIPE)
    assert sorted(result.converted) == ["flax", "linear"]
    assert dict(result.left) == {
        "experts": 'its einsum "ECD,EDH->ECH" has a product for each E',
        "narrow": "FP8 needs features divisible by 16, got 32 to 10",
        "precise": "has its own precision",
        "convolution": "its class is Conv, none that convert knows",
    }


def test_it_learns_with_adapters_on_frozen_params():
    model = Model()
    fp8.nnx.convert(model, RECIPE, lora=fp8.Lora(rank=4, targets=("q", "o")), rngs=nnx.Rngs(1))
    assert sorted(fp8.nnx.freeze_kernels(model)) == ["o", "q"] and model.q.w is None
    variables, merge = fp8.nnx.split(model)
    assert sorted(variables["fp8_frozen"]["q"]) == ["~product"] and sorted(variables["params"]["q"]) == [
        "lora_a",
        "lora_b",
    ]
    tx = fp8.freeze(fp8.fused_adamw(3e-2), trained="lora_")
    state = fp8.TrainState.create(variables=variables, tx=tx)

    def loss(variables, tokens):
        logits = merge(variables)(tokens)[:, :-1]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return -jnp.mean(chosen)

    step, losses = fp8.make_train_step(loss, tx, RECIPE), []
    for _ in range(10):
        state, metrics = step(state, TOKENS)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1, losses
    trained = merge(state.variables)
    fp8.nnx.merge_adapters(trained)
    assert trained.q.w.shape == (2, 32, 16)
