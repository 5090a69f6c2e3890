"""The provider for qwix, with a stand-in for qwix; tests/hosts/qwix_check.py has the real one."""

import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax

import jax_fp8 as fp8
from jax_fp8.integrations.qwix import Fp8Provider

STATE = "_overwrite_with_gradient"
CARRIED = nnx.variablelib.variable_type_from_name(STATE, allow_register=True)
DELAYED = fp8.DelayedScaling(amax_history_len=4)
X = jax.random.normal(jax.random.key(0), (32, 16))
DIMS = ((1,), (0,)), ((), ())


@dataclasses.dataclass(frozen=True)
class Interceptor:
    mapping: dict
    id: int


class HostProvider:
    """What the provider takes from qwix's own."""

    def __init__(self, rules):
        del rules

    def get_interceptors(self):
        return [lambda: Interceptor({}, 0)]

    def process_model_inputs(self, model, args, kwargs):
        COUNTS.clear()
        return model, args, kwargs

    def process_model_output(self, method_name, output):
        return output


COUNTS: dict = {}
HERE = []  # the NNX modules that are being called


def current_module():
    if not HERE:
        raise ValueError("Current module is not known.")
    return HERE[-1]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """qwix as far as the provider knows it."""
    qwix = ModuleType("qwix")
    qwix.QuantizationProvider = HostProvider
    flax_util = SimpleNamespace(get_current_module=current_module)
    aux_data = SimpleNamespace(
        get=lambda obj, key, default: COUNTS.get((id(obj), key), default),
        set=lambda obj, key, value: COUNTS.__setitem__((id(obj), key), value),
    )
    modules = {"qwix": qwix, "qwix._src.utils.flax_util": flax_util, "qwix._src.aux_data": aux_data}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    HERE.clear()


class Layers(nnx.Module):
    """Products that are in its call, and not in modules of Flax, which the stand-in does not intercept."""

    def __init__(self, rngs=None):
        shapes = {"up": (16, 48), "heads": (48, 4, 8), "odd": (32, 10), "tied": (64, 48)}
        for number, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, nnx.Param(jax.random.normal(jax.random.key(number), shape) / 8))
        self.unseen = nnx.Param(jnp.ones((3, 5)))
        self.qwix_path, self.disable_quant_stats_update = ("mlp",), True

    def __call__(self, x, ops):
        h = ops.dot_general(x, self.up[...], DIMS)
        y = ops.einsum("bd,dhe->bhe", h, self.heads[...])
        scores = ops.einsum("bhe,che->bc", y, y)
        z = ops.dot(y.reshape(len(y), -1), self.odd[...])
        tied = ops.matmul(h, self.tied[...].T)
        first = ops.einsum("vd,bd->bv", self.tied[...], h)
        return jnp.mean(z) + jnp.mean(scores) + jnp.mean(tied**2) + jnp.mean(first)


PLAIN = SimpleNamespace(dot_general=lax.dot_general, einsum=jnp.einsum, dot=jnp.dot, matmul=jnp.matmul)


def called(provider, model, x=X):
    """A call as qwix makes it."""
    if "_unquantized_type" not in vars(type(model)):
        model.__class__ = type("Layers", (type(model),), {"_unquantized_type": type(model)})
    provider.process_model_inputs(model, (x,), {})
    mapping = provider.get_interceptors()[0]().mapping
    ops = SimpleNamespace(**{name.rsplit(".", 1)[1]: function for name, function in mapping.items()})
    HERE.append(model)
    try:
        y = model(x, ops)
    finally:
        HERE.pop()
    return provider.process_model_output("__call__", y)


def first_call(rules, model=None):
    model = Layers() if model is None else model
    provider = Fp8Provider(rules)
    called(provider, model)
    model.disable_quant_stats_update = False
    return provider, model


def test_what_is_taken_and_what_is_left(capsys):
    provider, _ = first_call({".*": fp8.CurrentScaling()})
    found = provider.listing()
    assert found.in_fp8 == ("mlp/dot_general0", "mlp/einsum0", "mlp/matmul0", "mlp/einsum2")
    assert found.left["mlp/einsum1"] == "a product of activations"
    assert found.left["mlp/dot0"] == "10 columns are no multiple of 16"
    assert str(found) in capsys.readouterr().out
    called(provider, Layers())
    assert not capsys.readouterr().out  # it is printed once


def test_a_param_without_a_product_is_listed():
    provider = Fp8Provider({".*": fp8.CurrentScaling()})
    called(provider, Layers())
    assert provider.listing().left["mlp/unseen"] == "no product by this param was seen"


@pytest.mark.parametrize("recipe", [fp8.CurrentScaling(), fp8.BlockScaling(), DELAYED], ids=lambda r: type(r).__name__)
def test_values_are_close_to_those_of_the_model(recipe):
    provider, model = first_call({".*": recipe})
    found, expected = called(provider, model), Layers()(X, PLAIN)
    assert found != expected
    np.testing.assert_allclose(found, expected, rtol=0.1)


def test_the_state_is_its_own_gradient_and_that_of_dot_general():
    provider, model = first_call([("mlp", DELAYED)])
    kernel = model.up[...]
    before = {"scale": model.dot_general0_scale[...], "amax_history": model.dot_general0_amax_history[...]}
    jax.tree.map(np.testing.assert_array_equal, before, fp8.init_state(DELAYED, kernel))
    by = nnx.DiffState(0, nnx.Any(nnx.Param, CARRIED))
    grads = nnx.grad(lambda model: called(provider, model), argnums=by)(model)
    state = nnx.to_pure_dict(nnx.filter_state(grads, CARRIED))
    assert set(state) == {f"{op}_{leaf}" for op in ("dot_general0", "einsum0", "einsum2", "matmul0") for leaf in before}
    assert all((history[:, -1] > 0).all() for name, history in state.items() if "history" in name)
    np.testing.assert_allclose(state["dot_general0_amax_history"][:2, -1], [abs(X).max(), abs(kernel).max()], rtol=1e-6)


def test_rules_hold_in_their_order():
    provider, model = first_call([("m.*", None), (".*", DELAYED)])
    assert provider.listing().in_fp8 == ()
    assert provider.listing().left["mlp/einsum0"] == "by the rule 'm.*'"
    provider, _ = first_call({"other": DELAYED})
    assert provider.listing().left["mlp/einsum0"] == "no rule matches"
    assert not jax.tree.leaves(nnx.state(model, CARRIED))


def test_rows_that_do_not_fit_are_left_with_a_warning():
    provider, model = first_call({".*": fp8.CurrentScaling()})
    with pytest.warns(UserWarning, match="mlp is not in FP8: 3 rows of its input are no multiple of 16; pad the input"):
        found = called(provider, model, X[:3])
    np.testing.assert_array_equal(found, Layers()(X[:3], PLAIN))


def test_inside_of_a_jit_products_are_left():
    class Jitted(Layers):
        def __call__(self, x, ops):
            return jnp.mean(jax.jit(lambda x: ops.dot(x, self.up[...]))(x))

    provider, _ = first_call({".*": DELAYED}, Jitted())
    assert "jax.jit" in provider.listing().left["mlp"]


def test_settings_that_fp8_does_not_have_are_left():
    class Other(Layers):
        def __call__(self, x, ops):
            low = ops.einsum("bd,dh->bh", x, self.up[...], preferred_element_type=jnp.bfloat16)
            high = ops.dot_general(x, self.up[...], DIMS, lax.Precision.HIGHEST)
            double = ops.einsum("bd,bd->b", x, x[:, :16])
            three = ops.einsum("bd,dh,h->b", x, self.up[...], jnp.ones(48))
            assert low.dtype == jnp.bfloat16
            return sum(map(jnp.mean, (high, double, three, ops.dot(x, jnp.ones((16,))))))

    provider, _ = first_call({".*": fp8.CurrentScaling()}, Other())
    found = provider.listing()
    assert found.in_fp8 == ("mlp/einsum0",)
    assert "precision" in found.left["mlp/dot_general0"]
    assert 'its einsum must be "input,kernel->result"' in found.left["mlp/einsum2"]


def test_linen_makes_the_state_in_init():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, ops):
            HERE.append(self)
            try:
                return ops.dot_general(x, self.param("kernel", nn.initializers.lecun_normal(), (16, 32)), DIMS)
            finally:
                HERE.pop()

    provider, model = Fp8Provider({".*": DELAYED}), Model()
    provider.process_model_inputs(Layers(), (), {})
    mapping = provider.get_interceptors()[0]().mapping
    ops = SimpleNamespace(dot_general=mapping["jax.lax.dot_general"])
    variables = model.init(jax.random.key(0), X, ops)
    assert set(variables[STATE]) == {"dot_general0_scale", "dot_general0_amax_history"}
    COUNTS.clear()
    grads = jax.grad(lambda variables: jnp.mean(model.apply(variables, X, ops)))(variables)
    assert (grads[STATE]["dot_general0_amax_history"][:, -1] > 0).all()
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.1)).apply_gradients(grads=grads)
    jax.tree.map(np.testing.assert_array_equal, state.params[STATE], grads[STATE])
    assert np.any(state.params["params"]["kernel"] != variables["params"]["kernel"])
    with pytest.raises(ValueError, match=r"give nn\.scan or nn\.vmap variable_axes"):
        model.init(jax.random.key(0), X, ops, mutable=["params"])


def test_adapters_and_a_second_call_are_refused():
    adapted = Layers()
    adapted.up_lora_a = nnx.LoRAParam(jnp.ones((16, 4)))
    with pytest.raises(
        ValueError, match="would take the first provider out of this model; begin with one that has none"
    ):
        first_call({".*": DELAYED}, adapted)
    _, model = first_call({".*": DELAYED})
    with pytest.raises(ValueError, match=r"once, with Fp8Provider\(rules, adapters=qwix.LoraProvider"):
        _ = type(model)._unquantized_type
    provider = Fp8Provider({".*": DELAYED}, adapters=HostProvider([]))
    assert len(provider.get_interceptors()) == 2
    called(provider, adapted)


def test_what_is_refused():
    for rules in (None, {"(": DELAYED}, [DELAYED], {3: DELAYED}):
        with pytest.raises(ValueError, match="rules must be regular expressions with a recipe or None each, got"):
            Fp8Provider(rules)
    with pytest.raises(ValueError, match="recipe"):
        Fp8Provider({".*": "delayed"})
    with pytest.raises(ValueError, match="listing needs a call of the model, got none"):
        Fp8Provider({".*": DELAYED}).listing()


def test_without_qwix_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ImportError, match="this function needs qwix, which is not installed; pip install qwix"):
        Fp8Provider({".*": DELAYED})
