"""Rules of a step from the names that params carry, and arrays without them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from hybrid import gpt, make_mesh, tokens
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.grads.loss_trace import LossTrace
from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.parallel.names import rules_from_names, without_names
from jax_fp8.parallel.placement import place_params

pytestmark = pytest.mark.versions

# The names of GPT as layers and sizes place its params without rules.
AS_BY_DEFAULT = [
    ("embed", "fsdp"), ("positions", "fsdp"), ("kv_heads", "tensor"),
    *((name, axes) for name in ("heads", "mlp", "vocab") for axes in (("tensor", "fsdp"), "tensor")),
]  # fmt: skip


def boxed(*names, shape=(4, 8), cls=nn.LogicallyPartitioned, **options):
    return cls(jnp.zeros(shape), names, **options)


def variables(**params):
    return {"params": {"layer": params}}


def test_rules_name_one_param_each_by_all_dims():
    found = rules_from_names(
        variables(
            kernel=boxed("embed", "mlp"), bias=boxed("mlp", shape=(8,)), short=boxed("mlp"), other=jnp.zeros(3),
            axes=boxed(None, "tensor", cls=nn.Partitioned), of_its_own=boxed("a", None, rules=(("a", "fsdp"),)),
        ),
    )  # fmt: skip
    assert dict(found) == {
        "^layer/axes$": P(None, "tensor"), "^layer/of_its_own$": P("fsdp", None),
        "^layer/kernel$": P(None, None), "^layer/bias$": P(None), "^layer/short$": P(None, None),
    }  # fmt: skip
    logical = [("embed", "fsdp"), ("mlp", ("tensor", "fsdp")), ("mlp", "tensor")]
    given = variables(kernel=boxed("embed", "mlp"), bias=boxed("mlp", shape=(8,)), short=boxed("mlp"))
    by_argument = rules_from_names(given, logical)
    assert dict(by_argument) == {
        "^layer/kernel$": P("fsdp", "tensor"), "^layer/bias$": P("tensor"),  # a vector is whole over fsdp
        "^layer/short$": P(("tensor", "fsdp"), None),
    }  # fmt: skip
    with nn.logical_axis_rules(logical):
        assert rules_from_names(given) == by_argument


@pytest.mark.parametrize("fields", [{}, {"tie_embeddings": False, "activation": "swiglu", "norm": "rmsnorm"}], ids=str)
def test_names_of_gpt_can_say_what_is_the_default(fields):
    model = gpt(fp8.CurrentScaling(), num_layers=1, **fields)
    inputs = jax.random.key(0), tokens()[:, :-1]
    shapes = jax.eval_shape(model.init, *inputs)["params"]
    names = jax.eval_shape(model.clone(logical_axes=True).init, *inputs)
    declared, mesh = LossTrace.from_function(model.init, *inputs).declared, make_mesh(fsdp=2, tensor=2)

    def specs(rules):
        return place_params(Parallelism(mesh, rules), shapes, declared).specs

    assert specs(rules_from_names(names, AS_BY_DEFAULT)) == specs(())
    assert specs(rules_from_names(names, AS_BY_DEFAULT[1:])) != specs(())  # negative control


def test_what_has_no_names():
    for given in (variables(kernel=jnp.zeros((4, 8))), {"params": {}}):
        with pytest.raises(ValueError, match=r"params whose initializers name their dims, got none; make layers with "):
            rules_from_names(given)
    with pytest.raises(ValueError, match='needs variables with "params", got LogicallyPartitioned; pass what jax'):
        rules_from_names(boxed("embed"))


def test_arrays_without_names_are_not_moved():
    """Where a mesh and rules are set, `nn.unbox` puts them elsewhere."""
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    tree = {"a": boxed("embed", "mlp"), "b": jnp.ones(3)}
    with jax.set_mesh(mesh), nn.logical_axis_rules((("mlp", "tensor"),)):
        found = jax.jit(without_names)(tree)
        assert found["a"] is not tree["a"] and found["a"].sharding.is_fully_replicated
        assert not jax.jit(nn.unbox)(tree)["a"].sharding.is_fully_replicated  # negative control
