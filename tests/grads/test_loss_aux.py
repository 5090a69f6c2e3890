"""What a loss returns beside its number: where it goes, how parts of a batch are joined, and what is refused. A whole
model is trained in tests/batches/test_batch_statistics.py.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze
from jax.sharding import AxisType, PartitionSpec

import jax_fp8 as fp8
from jax_fp8.grads.loss_aux import Aux, joined_devices, joined_microbatches

pytestmark = pytest.mark.versions

TX = optax.sgd(0.0)
STATS = {"mean": jnp.zeros(2), "calls": jnp.int32(3), "is_set": jnp.bool_(False)}
VARIABLES = {"params": {"w": jnp.ones(())}, "batch_stats": STATS, "counts": {"n": jnp.zeros(1)}}
X = np.arange(8.0, dtype=np.float32).reshape(8, 1)
PARTS = (
    {},
    {"microbatches": 4},
    {"parallel": {"data": 4}},
    {"parallel": {"tensor": 2}},
    {"parallel": {"data": 2}, "microbatches": 2},
)


def updates(variables, x):
    """Statistics of these rows, as a layer of one's own may keep them."""
    before = variables["batch_stats"]
    mean = 0.5 * before["mean"] + 0.5 * jnp.mean(x)
    return {"batch_stats": {"mean": mean, "calls": before["calls"] + 1, "is_set": jnp.any(x > 6)}}


def loss_fn(variables, x):
    aux = {"mean": jnp.mean(x), "rows": x.shape[0], "small": jnp.sum(x < 4, dtype=jnp.int8), "any": jnp.any(x > 6)}
    return jnp.mean(x) * variables["params"]["w"], {**updates(variables, x), **aux}


def make_mesh(**axes):
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices)


def run(loss_fn=loss_fn, x=X, variables=VARIABLES, steps=1, call=None, **options):
    options = options | ({"parallel": make_mesh(**options["parallel"])} if "parallel" in options else {})
    step = fp8.make_train_step(loss_fn, TX, None, **{"has_aux": True} | options)
    state = step.place(fp8.TrainState.create(variables=variables, tx=TX), x)
    for _ in range(steps):
        state, metrics = step(state, x, **call or {})
    return state, metrics


@pytest.mark.parametrize("options", PARTS, ids=str)
def test_parts_are_joined_as_if_they_were_one(options):
    state, metrics = run(**options)
    assert float(metrics["loss"]) == 3.5
    assert {name: np.asarray(value).item() for name, value in metrics["aux"].items()} == {
        "mean": 3.5, "rows": 8, "small": 4, "any": True,
    }  # fmt: skip
    stats = state.collections["batch_stats"]
    assert stats["mean"].tolist() == [1.75, 1.75] and int(stats["calls"]) == 4 and bool(stats["is_set"])
    assert state.collections["counts"]["n"].tolist() == [0.0]  # which the loss never returns
    assert metrics["aux"]["small"].dtype == jnp.int32 and stats["calls"].dtype == jnp.int32


def test_counts_of_many_parts_do_not_wrap():
    x = np.zeros((512, 1), np.float32)
    _, metrics = run(lambda v, x: (jnp.mean(x) * v["params"]["w"], jnp.sum(x < 1, dtype=jnp.uint8)), x, microbatches=4)
    assert int(metrics["aux"]) == 512
    assert int(jnp.sum(jnp.full(4, 128, jnp.uint8), dtype=jnp.uint8)) == 0  # negative control: in 8 bits they do


def test_the_next_step_begins_where_this_one_ended():
    stats = run(steps=3)[0].collections["batch_stats"]
    assert stats["mean"].tolist() == [3.5 * 0.875] * 2 and int(stats["calls"]) == 6


@pytest.mark.parametrize("aux", [3.0, (1.0, jnp.arange(2.0)), {}, freeze({"a": {"b": 1.0}}), None], ids=str)
def test_aux_of_any_structure(aux):
    _, metrics = run(lambda v, x: (jnp.mean(x) * v["params"]["w"], aux), microbatches=2)
    jax.tree.map(
        np.testing.assert_array_equal,
        metrics["aux"],
        aux if not isinstance(aux, type(freeze({}))) else {"a": {"b": 1.0}},
    )


@pytest.mark.parametrize("limit", [1.0, 10.0])
def test_a_step_that_is_skipped_leaves_collections_alone(limit):
    state, metrics = run(call={"skip_above": limit})
    assert int(metrics["skipped"]) == int(limit < 3.5)
    assert int(state.collections["batch_stats"]["calls"]) == (3 if limit < 3.5 else 4)
    assert float(metrics["aux"]["mean"]) == 3.5  # what the loss has said is seen all the same


def test_means_in_16_bits_are_computed_in_32():
    """256 ones and a 3: in bfloat16 a sum stays at 256."""
    stacked = jnp.ones(257, jnp.bfloat16).at[256].set(3)
    joined = joined_microbatches(Aux({"c": stacked}, {"a": stacked, "n": jnp.arange(3), "f": jnp.array([False, True])}))
    assert joined.rest["a"] == joined.collections["c"] == jnp.bfloat16(259 / 257) != 1
    assert (int(joined.rest["n"]), bool(joined.rest["f"])) == (3, True)


def test_devices_are_joined_like_microbatches():
    stacked = {"a": jnp.arange(4.0), "n": jnp.arange(4), "f": jnp.arange(4) > 2}
    of_device = jax.shard_map(
        lambda tree: joined_devices(Aux({"c": tree}, tree), ("data",)),
        mesh=jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]),
        in_specs=PartitionSpec("data"), out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip
    found, expected = jax.jit(of_device)(stacked), joined_microbatches(Aux({"c": stacked}, stacked))
    jax.tree.map(lambda got, wanted: np.testing.assert_array_equal(got[0], wanted), found, expected)
    aux = Aux({}, {"a": 1.0})
    assert joined_devices(aux, ()) is aux


def test_what_a_step_says_of_itself_and_a_warm_start_ignore_aux():
    recipe = fp8.DelayedScaling(amax_history_len=2)
    layer, x = fp8.Dense(16, recipe=recipe), jax.random.normal(jax.random.key(0), (32, 16))

    def loss_fn(variables, x):
        return jnp.mean(jnp.square(layer.apply(variables, x))), {"rows": x.shape[0]}

    step = fp8.make_train_step(loss_fn, TX, recipe, microbatches=2, has_aux=True)
    state = fp8.TrainState.create(variables=layer.init(jax.random.key(1), x), tx=TX)
    assert step.diagnose(state, x).rows()
    state = step.warm_start(state, x)
    assert (np.asarray(state.fp8["scale"]) != 1).all()
    state, metrics = step(state, x, diagnose=True)
    assert metrics["diagnostics"].rows() and int(metrics["aux"]["rows"]) == 32


def returning(aux):
    return lambda variables, x: (jnp.mean(x) * variables["params"]["w"], aux(variables, x))


def with_stats(**changes):
    return returning(lambda variables, x: {"batch_stats": STATS | changes})


FP8 = {"fp8": {"scale": jnp.ones(3), "amax_history": jnp.ones((3, 2))}}
REFUSED = {
    "the shape of a collection": (with_stats(mean=jnp.zeros(3)), {}, r'aux\["batch_stats"\] must be like the collection'
        r" .*\['mean'\] must be float32\[2\], got float32\[3\]; return what model.apply"),
    "its dtype": (with_stats(mean=jnp.zeros(2, jnp.bfloat16)), {}, r"must be float32\[2\], got bfloat16\[2\]"),
    "its structure": (with_stats(more=1.0), {}, r"\['more'\] does not belong there; .* leave a collection that grows"),
    "fp8": (returning(lambda v, x: {**FP8, **updates(v, x)}), {}, 'aux must leave the collection "fp8" to the step'),
    "params": (returning(lambda v, x: {"params": v["params"]}), {}, 'the collection "params" to the step, which moves'),
    "collections inside": (returning(lambda v, x: {"updates": updates(v, x)}), {}, r"collections must be entries of aux"
        r", .*, got a dict with 'batch_stats' at aux\['updates'\]; return \(loss, \{\*\*updates, ...\}\)"),
    "collections in a pair": (returning(lambda v, x: (x.mean(), updates(v, x))), {}, r"with 'batch_stats' at aux\[1\]"),
    "a collection without its name": (returning(lambda v, x: updates(v, x)["batch_stats"]), {},
        "'mean', 'calls', 'is_set' at aux; return"),
    "fp8 inside": (returning(lambda v, x: (1.0, FP8)), {}, r"got a dict with 'fp8' at aux\[1\]"),
    "text": (returning(lambda v, x: {"name": "text"}), {}, r"numbers and flags, got a str at aux\['name'\]; leave it"),
    "a key": (returning(lambda v, x: jax.random.key(0)), {}, r"must hold numbers and flags, got key<fry>\[\] at aux;"),
    "rows": (returning(lambda v, x: {"y": x}), {"microbatches": 2}, "aux must have shapes that do not depend on the num"
        r"ber of rows, .* in a part of it \['y'\] must be float32\[8, 1\], got float32\[4, 1\]; return a mean or a"),
    "rows of devices": (returning(lambda v, x: x), {"parallel": {"data": 2}}, "got float32.4, 1.; return a mean or a"),
    "no pair": (lambda v, x: jnp.mean(x) * v["params"]["w"], {}, r"must return \(loss, aux\) with has_aux=True, got"),
    "a loss of integers": (lambda v, x: (jnp.int32(1), {}), {"parallel": {"data": 2}}, "floating point scalar, got i"),
    "a number": (loss_fn, {"has_aux": 1}, "has_aux must be True or False, got 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    loss, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        run(loss, **options)


def test_rows_are_no_matter_where_there_is_one_part():
    _, metrics = run(returning(lambda v, x: {"y": x}))
    np.testing.assert_array_equal(metrics["aux"]["y"], X)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_random_keys_in_a_collection(microbatches):
    """There is no mean of two keys; with one part there is none to be made."""
    variables = {"params": VARIABLES["params"], "keys": {"own": jax.random.key(0)}}
    loss = returning(lambda v, x: {"keys": {"own": jax.random.split(v["keys"]["own"])[0]}})
    if microbatches == 1:
        new = run(loss, variables=variables)[0].collections["keys"]["own"]
        assert not jnp.array_equal(jax.random.key_data(new), jax.random.key_data(variables["keys"]["own"]))
    else:
        with pytest.raises(
            ValueError, match=r"parts of a batch change must hold numbers, .* got key<fry>; take random"
        ):
            run(loss, variables=variables, microbatches=microbatches)


def test_metrics_with_the_names_of_variables_are_metrics():
    """Where the shapes are others, or where there are numbers alone, as of no layer's statistics."""
    aux = {"at": {"mean": 1.0, "calls": 2, "is_set": True}, "fp8": 1.0, "params": 2.0, "mean": 3.0}
    found = run(returning(lambda v, x: aux))[1]["aux"]
    assert jax.tree.map(lambda x: np.asarray(x).item(), found) == aux


def test_microbatches_in_pieces_have_no_aux():
    step = fp8.make_train_step(loss_fn, TX, None, microbatches=2, has_aux=True)
    state = fp8.TrainState.create(variables=VARIABLES, tx=TX)
    message = "in pieces need a loss that returns a number alone, got a step with has_aux=True; call step"
    with pytest.raises(ValueError, match=message):
        step.start(state)
    without = fp8.make_train_step(lambda *given: loss_fn(*given)[0], TX, None, microbatches=2)
    with pytest.raises(ValueError, match=message):
        step.accumulate_step(state, without.start(state), X[:4], True)
    pending = without.start(state)
    for first in (True, False):
        pending = without.accumulate_step(state, pending, X[:4], first)
    state = without.apply_step(state, pending)[0]  # collections of a state are carried all the same
    assert int(state.collections["batch_stats"]["calls"]) == 3


def test_a_loss_by_its_layers_has_no_aux():
    model = fp8.GPT(fp8.GPTConfig.preset("tiny", num_layers=1), recipe=None)
    loss = fp8.next_token_loss(model)
    with pytest.raises(ValueError, match=r"needs a function that returns \(loss, aux\), got a LayeredLoss, whose"):
        fp8.make_train_step(loss, TX, None, has_aux=True)
    fp8.make_train_step(lambda v, tokens: (loss(v, tokens), {}), TX, None, has_aux=True)


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("intermediates", "mean", jnp.mean(x))
        self.sow("losses", "square", jnp.mean(x**2))
        return x * self.param("w", nn.initializers.ones, ())


def test_what_layers_sow():
    """Intermediates are seen; a collection that `init` returned grows with every call, and is refused."""
    model = Sowing()
    variables = model.init(jax.random.key(0), X)

    def loss_fn(variables, x):
        y, updates = model.apply(variables, x, mutable=["intermediates", "losses"])
        return jnp.mean(y), updates

    with pytest.raises(ValueError, match=r'aux\["losses"\] must be like .* leave a collection that grows'):
        run(loss_fn, variables=variables)
    state, metrics = run(loss_fn, variables={"params": variables["params"]}, microbatches=2)
    assert float(metrics["aux"]["intermediates"]["mean"][0]) == 3.5 and state.collections == {}
