"""Where params lie: as layers declare, by rules, by size; and that an optimizer's state lies where its params do."""

import jax
import jax.numpy as jnp
import optax
import pytest
from hybrid import gpt, make_mesh, tokens
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.core.shards import ParamSharding
from jax_fp8.grads.loss_trace import LossTrace
from jax_fp8.parallel.mesh import Parallelism
from jax_fp8.parallel.param_place import ParamPlace
from jax_fp8.parallel.placement import place_params, placed_shapes, put, zeros_like

pytestmark = pytest.mark.versions

HOW = Parallelism(make_mesh(fsdp=2, tensor=2))
PARAMS = {
    "up": {"kernel": jnp.zeros((8, 12)), "bias": jnp.zeros(12)},
    "odd": {"kernel": jnp.zeros((3, 4)), "bias": jnp.zeros(4)},
    "stack": {"kernel": jnp.zeros((5, 8, 12))},
}
DECLARED = {
    ("up", "kernel"): ParamSharding(-1, 12, dtype=jnp.bfloat16),
    ("up", "bias"): ParamSharding(-1, 12),
    ("stack", "kernel"): ParamSharding(-2, 8),
}


def specs(parallel=HOW, params=PARAMS, declared=DECLARED):
    return place_params(parallel, params, declared).specs


def test_layers_say_what_tensor_splits_and_sizes_what_fsdp_does():
    assert specs() == {
        "up": {"kernel": P("fsdp", "tensor"), "bias": P("tensor")},
        "odd": {"kernel": P(None, "fsdp"), "bias": P()},  # columns where rows cannot be split, and vectors stay whole
        "stack": {"kernel": P(None, ("tensor", "fsdp"))},
    }
    assert specs(Parallelism(make_mesh(data=4))) == jax.tree.map(lambda _: P(), PARAMS)


def test_pipe_splits_the_parts_of_fsdp():
    """And what cannot go into as many parts stays whole, though `fsdp` alone could split it."""
    params = PARAMS | {"half": {"kernel": jnp.zeros((6, 10))}}
    assert specs(Parallelism(make_mesh(pipe=2, fsdp=2, tensor=2)), params) == {
        "up": {"kernel": P(("fsdp", "pipe"), "tensor"), "bias": P("tensor")},
        "odd": {"kernel": P(None, ("fsdp", "pipe")), "bias": P()},
        "stack": {"kernel": P(None, ("tensor", "fsdp", "pipe"))},
        "half": {"kernel": P()},
    }
    assert specs(params=params)["half"] == {"kernel": P("fsdp")}
    alone = specs(Parallelism(make_mesh(pipe=2)), params)
    assert alone["up"] == {"kernel": P("pipe"), "bias": P()} and alone["half"] == {"kernel": P("pipe")}


def test_a_rule_for_fsdp_holds_for_pipe():
    rules = (("up/kernel", P("tensor", "fsdp")), ("stack", P()))
    found = specs(
        Parallelism(make_mesh(pipe=2, fsdp=2, tensor=2), rules), declared={("up", "kernel"): ParamSharding(-2, 8)}
    )
    assert found["up"]["kernel"] == P("tensor", ("fsdp", "pipe")) and found["stack"]["kernel"] == P()
    assert specs(Parallelism(make_mesh(pipe=2), (("up/kernel", P(None, "fsdp")),)))["up"]["kernel"] == P(None, "pipe")


def test_amaxes_of_weights_are_those_of_all_stages():
    """Where weights are cast each device has its part of a layer; in the layers those of `pipe` have others."""
    placement = place_params(Parallelism(make_mesh(pipe=2, fsdp=2, tensor=2)), PARAMS, DECLARED)
    assert placement.shards.axes == ("fsdp", "tensor") and placement.shards.batch_parts == 2
    assert placement.shards_of_weights.axes == ("fsdp", "pipe", "tensor")
    assert placement.splits_params and place_params(Parallelism(make_mesh(pipe=2)), PARAMS, {}).splits_params
    places = place_params(HOW, PARAMS, DECLARED)
    assert places.shards_of_weights == places.shards


def test_rules_come_before_what_layers_say_and_the_first_counts():
    rules = (("^odd/", P("fsdp")), ("kernel", P(None, "fsdp")), ("up/kernel", P("tensor")))
    found = specs(Parallelism(HOW.mesh, rules))
    assert found["odd"] == {"kernel": P(None, "fsdp"), "bias": P("fsdp")}  # a spec is of the last dims
    assert found["up"] == {"kernel": P(None, "fsdp"), "bias": P("tensor")}
    assert found["stack"]["kernel"] == P(None, None, "fsdp")


def test_few_heads_are_whole_on_all_devices_and_their_gradient_is_in_parts():
    of_heads = ParamSharding(-1, 2, "heads", or_whole=True)
    parallel = Parallelism(make_mesh(tensor=4))
    by_path = place_params(parallel, PARAMS, DECLARED | {("up", "kernel"): of_heads}).by_path
    assert by_path["up", "kernel"] == ParamPlace((8, 12), None, None, True, storage=())
    assert not by_path["up", "bias"].is_partial
    by_rule = Parallelism(make_mesh(tensor=4), (("up/kernel", P()),))
    assert place_params(by_rule, PARAMS, DECLARED | {("up", "kernel"): of_heads}).by_path["up", "kernel"].is_partial


def test_what_a_device_computes_with():
    places = place_params(HOW, PARAMS, DECLARED)
    assert places.shards.dims["up", "kernel"] == -1 and places.shards.dims["odd", "kernel"] is None
    assert places.shards.axes == ("fsdp", "tensor") and places.shards.batch_parts == 2 and places.splits_params
    assert not place_params(Parallelism(make_mesh(data=2)), PARAMS, DECLARED).splits_params


def test_experts_are_split_whatever_rules_say():
    experts = ParamSharding(has_experts=True)
    params = {"mlp": {"up": {"kernel": jnp.zeros((8, 4, 6))}, "router": {"kernel": jnp.zeros((4, 8))}}}
    declared = {("mlp", "up", "kernel"): experts, ("mlp", "router", "kernel"): ParamSharding()}
    parallel = Parallelism(make_mesh(fsdp=2, expert=4))
    places = place_params(parallel, params, declared)
    assert places.specs["mlp"] == {"up": {"kernel": P("expert", "fsdp")}, "router": {"kernel": P("fsdp")}}
    assert places.by_path["mlp", "up", "kernel"].shape_in_layer(parallel) == (2, 4, 6)
    assert places.shards.experts == parallel.experts and places.shards.batch_parts == 8
    by_rule = Parallelism(parallel.mesh, rules=[("up/kernel", P(None, None, "fsdp"))])
    assert place_params(by_rule, params, declared).specs["mlp"]["up"]["kernel"] == P("expert", None, "fsdp")
    odd = {"mlp": {"up": {"kernel": jnp.zeros((6, 4, 6))}}}
    with pytest.raises(ValueError, match=r"expert=4 must divide the experts of mlp/up/kernel, got 6 .* or 8 experts"):
        place_params(parallel, odd, declared)


@pytest.mark.parametrize(
    "tx", [optax.adam(1e-3), fp8.fused_adamw(1e-3), optax.adafactor(1e-3)], ids=["adam", "fused", "adafactor"]
)
def test_moments_lie_where_their_params_do(tx):
    params = {"wide": {"kernel": jnp.zeros((256, 384))}}
    placement = place_params(HOW, params, {("wide", "kernel"): ParamSharding(-1, 384)})
    state = jax.eval_shape(lambda: fp8.TrainState.create(variables={"params": params}, tx=tx))
    shardings = placement.shardings(state)
    assert shardings.params["wide"]["kernel"].spec == P("fsdp", "tensor")
    for leaf, sharding in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(shardings.opt_state), strict=True):
        assert sharding.spec == (P("fsdp", "tensor") if leaf.shape == (256, 384) else P())
    shapes = placed_shapes(state, shardings)
    assert shapes.params["wide"]["kernel"].sharding == shardings.params["wide"]["kernel"]
    assert shapes.step.shape == ()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_zeros_are_made_where_they_belong(axis_type):
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(axis_type,), devices=jax.devices()[:2])
    places = {"a": NamedSharding(mesh, P("fsdp")), "b": NamedSharding(mesh, P())}
    wanted = placed_shapes({"a": jnp.ones((4, 3), fp8.E4M3), "b": jnp.int32(1)}, places)
    made = zeros_like(wanted)
    for name, array in made.items():
        assert (array.shape, array.dtype) == (wanted[name].shape, wanted[name].dtype)
        assert array.sharding.is_equivalent_to(places[name], array.ndim) and not array.astype(jnp.float32).any()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_arrays_of_a_program_are_put_on_meshes_of_each_kind(axis_type):
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(axis_type,), devices=jax.devices()[:2])
    placement = place_params(Parallelism(mesh), {"up": PARAMS["up"]}, {})
    with jax.set_mesh(mesh):
        moved = jax.jit(lambda tree: put(tree, placement.shardings(tree)))({"up": PARAMS["up"]})
    assert moved["up"]["kernel"].sharding.spec[0] == "fsdp"


def test_a_bias_is_split_where_the_columns_of_its_kernel_are():
    declared = {
        ("up", "kernel"): ParamSharding(-1, 12, by_rule=(-1, -2)),
        ("up", "bias"): ParamSharding(-1, 12, by_rule=(-1,), columns_of=("up", "kernel")),
    }
    specs_of = {"whole": (P(), P()), "columns": (P(None, "tensor"), P("tensor")), "rows": (P("tensor", None), P())}
    for of_kernel, of_bias in specs_of.values():
        rules = (("up/kernel", of_kernel), ("up/bias", of_bias))
        found = specs(Parallelism(HOW.mesh, rules), {"up": PARAMS["up"]}, declared)["up"]
        assert found == {"kernel": P("tensor") if of_kernel == P("tensor", None) else of_kernel, "bias": of_bias}
    for kernel, bias in (("whole", "columns"), ("columns", "whole"), ("rows", "columns")):
        rules = (("up/kernel", specs_of[kernel][0]), ("up/bias", specs_of[bias][1]))
        with pytest.raises(ValueError, match=r"tensor=2 where the columns of its kernel are, got P.* for up/kernel"):
            specs(Parallelism(HOW.mesh, rules), {"up": PARAMS["up"]}, declared)
        no_tensor = Parallelism(make_mesh(fsdp=2, tensor=1), rules)
        assert specs(no_tensor, {"up": PARAMS["up"]}, declared)["up"]["bias"] == P()
    with pytest.raises(ValueError, match=r"got P.* for up/bias; let the rules name both, or none"):
        specs(Parallelism(HOW.mesh, (("up/kernel", P()),)), {"up": PARAMS["up"]}, declared)


RULES = {
    "more dims": (P(None, None, "fsdp"), r"rule .* of up/kernel must not have more dims than .*\(8, 12\); shorten it"),
    "unknown axis": (P("data"), "rule .* of up/kernel may name fsdp and tensor, got 'data'; leave it out"),
    "pipe": (P("pipe"), "may name fsdp and tensor, got 'pipe'"),
    "parts of stages": (
        P(None, "fsdp"),
        r"splits 12 elements of up/kernel, shape \(8, 12\), in 8 parts, which must be equal; change the rule or the m",
    ),
    "rows": (
        P("tensor", None),
        r"a rule may split over tensor=4 what .* got P.* for up/kernel of .*, whose layer can split dim -1",
    ),
    "both": (P(None, ("tensor", "fsdp")), r"splits 12 elements of up/kernel, shape \(8, 12\), in 8 parts, which must"),
    "pieces": (
        P(None, "tensor"),
        r"tensor=4 must divide the heads of up/kernel, got 6 in shape \(8, 12\); choose .* or 8",
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_rules_that_do_not_fit_a_param(case):
    rule, message = RULES[case]
    axes = {"pipe": 4, "fsdp": 2} if case == "parts of stages" else {"fsdp": 2, "tensor": 4}
    parallel = Parallelism(make_mesh(**axes), (("up/kernel", rule),))
    with pytest.raises(ValueError, match=message):
        specs(
            parallel, {"up": PARAMS["up"]}, {("up", "kernel"): ParamSharding(-1, 12 if case == "both" else 6, "heads")}
        )


@pytest.mark.parametrize("declared", [{("up", "kernel"): ParamSharding()}, {}], ids=["a norm", "a layer of others"])
def test_a_rule_for_what_no_layer_can_split(declared):
    parallel = Parallelism(make_mesh(tensor=2), (("up/kernel", P(None, "tensor")),))
    with pytest.raises(
        ValueError, match=r"for up/kernel of shape \(8, 12\), whose layer needs all of it on every device; c"
    ):
        specs(parallel, {"up": PARAMS["up"]}, declared)


def test_a_rule_for_heads_of_which_each_device_has_all():
    declared = {("up", "kernel"): ParamSharding(-1, 2, "heads", or_whole=True)}
    parallel = Parallelism(make_mesh(tensor=4), (("up/kernel", P(None, "tensor")),))
    with pytest.raises(
        ValueError, match=r"must leave up/kernel whole over tensor=4, .* got P.* of 2; leave tensor out"
    ):
        specs(parallel, {"up": PARAMS["up"]}, declared)


# Changes of the config, and what does not go into three parts.
MODELS = {
    "heads": (
        {"num_heads": 4, "hidden_size": 192, "num_kv_heads": 1},
        r"tensor=3 must divide the query heads of layer_0/attention/query/bias, got 4 in",
    ),
    "kv heads": (
        {"num_heads": 12, "hidden_size": 192, "num_kv_heads": 4},
        "divide the key and value heads of .*key/bias, or be a multiple of it, got 4 in .*, or 6 key and value heads",
    ),
    "hidden features": (
        {"num_heads": 6, "hidden_size": 96, "mlp_hidden_size": 128},
        "tensor=3 must divide the hidden features of layer_0/mlp/down/kernel, got 128",
    ),
    "vocabulary": (
        {"num_heads": 6, "hidden_size": 96, "vocab_size": 128},
        "tensor=3 must divide the tokens of the vocabulary of embedding, got 128 in .*, or 129 tokens of",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_do_not_go_into_so_many_parts(case):
    changes, message = MODELS[case]
    model = gpt(fp8.CurrentScaling(), **({"vocab_size": 96, "num_layers": 1} | changes))
    layers = LossTrace.from_function(model.init, jax.random.key(0), tokens()[:, :-1])
    params = jax.eval_shape(model.init, jax.random.key(0), tokens()[:, :-1])["params"]
    with pytest.raises(ValueError, match=message):
        place_params(Parallelism(make_mesh(tensor=3)), params, layers.declared)
