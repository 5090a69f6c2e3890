"""MaxText's products, with stand-ins for its modules; tests/hosts/maxtext_check.py has the real ones."""

import sys
from types import ModuleType, SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_fp8 as fp8
from jax_fp8.integrations import maxtext

pytestmark = pytest.mark.versions

RECIPE = fp8.DelayedScaling(amax_history_len=4)
X = jax.random.normal(jax.random.key(0), (32, 64), jnp.bfloat16)


@pytest.fixture
def host(monkeypatch):
    """The modules of MaxText that are replaced, as far as `use` looks at them."""

    class Fp8Quantization:
        quantize_dtype = jnp.float8_e4m3fn

    class GateLogit:
        def __init__(self, quant=None):
            self.quant = quant

    class DenseGeneral(nnx.Module):
        pass

    started = []
    modules = {
        "maxtext.layers.quantizations": {
            "Fp8Quantization": Fp8Quantization,
            "configure_quantization": lambda config: Fp8Quantization() if config.quantization else None,
        },
        "maxtext.layers.moe": {"GateLogit": GateLogit},
        "maxtext.layers.linears": {"DenseGeneral": DenseGeneral},
        "maxtext.layers.nnx_wrappers": {"ToNNX": nnx.bridge.ToNNX},
        "maxtext.utils.model_creation_utils": {"create_model": lambda model: model},
        "maxtext.utils.gradient_accumulation": {"nnx": nnx},
        "maxtext.trainers.pre_train.train": {"main": started.append},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        for length in range(1, name.count(".") + 1):
            package = ".".join(name.split(".")[:length])
            if package not in sys.modules or package == "maxtext":
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setattr(maxtext._IN_USE, "is_installed", False)
    return SimpleNamespace(**{name.rsplit(".", 1)[1]: sys.modules[name] for name in modules}, started=started)


def test_use_puts_our_products_into_maxtext(host):
    own = host.quantizations.configure_quantization(SimpleNamespace(quantization="fp8", use_qwix_quantization=False))
    maxtext.use(RECIPE)
    config = SimpleNamespace(quantization=maxtext.STANDS_FOR, use_qwix_quantization=False)
    quant = host.quantizations.configure_quantization(config)
    product = quant.dot_general_cls(mesh_axes=("embed", "mlp"))()
    assert isinstance(product, maxtext.Product) and product.recipe == RECIPE and product.overwrite_with_gradient
    assert isinstance(quant, host.quantizations.Fp8Quantization) and quant.quantize_dtype is None
    assert quant.einsum(dtype=jnp.bfloat16).recipe == RECIPE
    others = SimpleNamespace(quantization="fp8", use_qwix_quantization=False)
    assert type(host.quantizations.configure_quantization(others)) is type(own)  # a control: MaxText's own
    assert host.moe.GateLogit(quant=quant).quant is None and host.moe.GateLogit(quant=own).quant is own


def test_the_last_recipe_counts_and_nothing_is_replaced_twice(host):
    maxtext.use(fp8.CurrentScaling())
    once = host.quantizations.configure_quantization
    maxtext.use(RECIPE)
    assert host.quantizations.configure_quantization is once
    config = SimpleNamespace(quantization=maxtext.STANDS_FOR, use_qwix_quantization=False)
    assert once(config).dot_general_cls()().recipe == RECIPE


def test_main_reads_its_options_and_passes_the_others_on(host):
    maxtext.main(["base.yml", "quantization=jax_fp8_current", "head=jax_fp8_block", "steps=3"])
    assert host.started == [["", "base.yml", "steps=3", f"quantization={maxtext.STANDS_FOR}"]]
    assert (maxtext._IN_USE.recipe, maxtext._IN_USE.head) == (fp8.CurrentScaling(), fp8.BlockScaling())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["base.yml"], "quantization= must be one of jax_fp8, jax_fp8_current, jax_fp8_block, got none"),
        (["quantization=fp8"], "got fp8; start MaxText's own program"),
        (["quantization=jax_fp8", "head=fp8"], "head= must be one of jax_fp8, .*, got fp8"),
    ],
)
def test_main_refuses_other_options(host, arguments, message):
    with pytest.raises(ValueError, match=message):
        maxtext.main(arguments)
    assert not host.started


def test_without_maxtext_it_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "maxtext"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="needs maxtext, which is not installed; pip install maxtext"):
        maxtext.use(RECIPE)


def test_recipes_are_checked():
    with pytest.raises(ValueError, match="use needs a recipe, got None"):
        maxtext.use(None)
    with pytest.raises(ValueError, match="recipe must be"):
        maxtext.use("delayed")


class Layer(nn.Module):
    """A layer that multiplies as MaxText's layers do."""

    features: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        return maxtext.Product(RECIPE)(x, kernel.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())), precision=None)


def test_a_product_is_that_of_dot_general():
    variables = Layer(48).init(jax.random.key(1), X)
    state, kernel = variables["_overwrite_with_gradient"]["Product_0"], variables["params"]["kernel"]
    expected = fp8.einsum("TD,DM->TM", X, kernel.astype(X.dtype), recipe=RECIPE, state=state)
    np.testing.assert_array_equal(Layer(48).apply(variables, X), expected)


def test_sizes_that_do_not_fit_stay_in_bfloat16():
    variables = Layer(10).init(jax.random.key(1), X)
    assert sorted(variables) == ["params"]
    found = Layer(10).apply(variables, X)
    np.testing.assert_array_equal(found, X @ variables["params"]["kernel"].astype(X.dtype))


EXPERTS = maxtext.ExpertEinsum(RECIPE, jnp.bfloat16)


def test_einsums_of_experts_are_grouped_products():
    """Their variables are made by operands of another size, as MaxText makes them."""
    variables = EXPERTS.init(jax.random.key(0), "ab,bc->ac", jnp.zeros((1, 1)), jnp.zeros((1, 1)))
    rows = jax.random.normal(jax.random.key(1), (4, 2, 16, 32))
    kernels = jax.random.normal(jax.random.key(2), (4, 32, 48))
    found, updates = EXPERTS.apply(
        variables, "EBCM,EMH -> EBCH", rows, kernels, precision=None, mutable=["_overwrite_with_gradient"]
    )
    expected = fp8.einsum(
        "EBCM,EMH->EBCH", rows.astype(jnp.bfloat16), kernels.astype(jnp.bfloat16), recipe=RECIPE,
        state=variables["_overwrite_with_gradient"],
    )  # fmt: skip
    np.testing.assert_array_equal(found, expected)
    jax.tree.map(np.testing.assert_array_equal, updates, variables)  # its state moves as a gradient alone


@pytest.mark.parametrize(
    ("text", "lhs", "rhs"),
    [
        ("BSM,BSEC->EBCM", (2, 16, 32), (2, 16, 4, 16)),  # a mask that sends tokens to experts
        ("BSM,EMH->BSEH", (2, 16, 32), (4, 32, 10)),
        ("BSM,EMH->BSE", (2, 16, 32), (4, 32, 16)),
    ],
)
def test_other_einsums_stay_as_they_are(text, lhs, rhs):
    variables = EXPERTS.init(jax.random.key(0), "ab,bc->ac", jnp.zeros((1, 1)), jnp.zeros((1, 1)))
    lhs, rhs = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate((lhs, rhs)))
    np.testing.assert_array_equal(EXPERTS.apply(variables, text, lhs, rhs), jnp.einsum(text, lhs, rhs))


class Bridged(nnx.Module):
    """An NNX layer around a Linen product, as MaxText's."""

    def __init__(self, rows, columns):
        self.in_features_shape, self.out_features_shape = (rows,), (columns,)
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(1), (rows, columns)) / 8)
        numbers = (((1,), (0,)), ((), ()))
        self.product = nnx.bridge.ToNNX(maxtext.Product(RECIPE), rngs=nnx.Rngs(0))
        self.product.lazy_init(X, self.kernel[...], numbers)

    @property
    def quant_dot_general(self):
        product = self.product
        product.to_nnx__module = product.to_nnx__module if hasattr(product, "to_nnx__module") else product.module
        return product

    def __call__(self, x):
        return self.product(x, self.kernel[...].astype(x.dtype), (((1,), (0,)), ((), ())), mutable=["aqt"])


def test_a_listing_names_every_product():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(Bridged(64, 48), Bridged(64, 10), nnx.Embed(8, 64, rngs=rngs), nnx.LayerNorm(64, rngs=rngs))
    found = maxtext.listing(model)
    assert found.in_fp8 == ("layers/0",)
    assert dict(found.left) == {
        "layers/1": "10 columns are no multiple of 16",
        "layers/2": "Embed without FP8",
    }


def test_accumulated_gradients_carry_the_state():
    """As in MaxText's loop over microbatches, in which the model's state other than params travels in the carry."""
    model = nnx.Sequential(Bridged(64, 48))

    def loss_fn(model, x):
        return jnp.mean(model(x).astype(jnp.float32) ** 2), {}

    differentiate = maxtext._WithCarriedState().value_and_grad(loss_fn, argnums=0, has_aux=True)
    for number in range(2):
        _, grads = differentiate(model, X * 2.0**number)
    history = np.asarray(model.layers[0].product.amax_history[...])
    np.testing.assert_array_equal(history[0], [0, 0, np.max(np.abs(X)), 2 * np.max(np.abs(X))])
    assert [path[-1] for path, _ in nnx.to_flat_state(grads)] == ["kernel"]
    plain = nnx.Sequential(Bridged(64, 48))
    with pytest.warns(UserWarning, match="not by its state"):
        fp8.ops.carried_state._warn_not_carried.cache_clear()
        nnx.value_and_grad(loss_fn, has_aux=True)(plain, X)
    assert not np.any(plain.layers[0].product.amax_history[...])  # a control: Flax's own function leaves it empty
