"""`Parallelism`: what axes split, what is refused, how a batch is placed, and which programs it makes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hybrid import make_mesh
from jax.sharding import PartitionSpec as P

import jax_fp8 as fp8
from jax_fp8.core.shards import TensorParallel
from jax_fp8.parallel.mesh import Parallelism, as_parallelism, describe_mesh, parse_axes

pytestmark = pytest.mark.versions

DATA, PIPE = make_mesh(data=2), make_mesh(pipe=2)


def test_what_each_axis_is_for():
    parallel = Parallelism(make_mesh(data=2, fsdp=2, tensor=2), sequence_parallel=True)
    assert parallel.batch_axes == ("data", "fsdp") and parallel.batch_parts == 4 and parallel.size("tensor") == 2
    assert parallel.tensor == TensorParallel("tensor", 2, sequence=True)
    assert parallel.batch_spec == P(("data", "fsdp")) and describe_mesh(parallel.mesh) == "data=2,fsdp=2,tensor=2"


def test_axes_of_one_device_are_none():
    parallel = Parallelism(make_mesh(pipe=1, data=1, tensor=1))
    assert (
        parallel.batch_axes == ()
        and parallel.batch_parts == 1
        and parallel.tensor is None
        and parallel.batch_spec == P()
    )
    assert parallel.stages == 1 and parallel.storage_axes == () and parallel.storage_parts == 1


def test_stages_split_params_as_fsdp_does_and_not_the_batch():
    parallel = Parallelism(make_mesh(pipe=2, fsdp=2, tensor=2))
    assert parallel.stages == 2 and parallel.storage_axes == ("fsdp", "pipe") and parallel.storage_parts == 4
    assert parallel.batch_axes == ("fsdp",) and parallel.batch_parts == 2 and parallel.batch_spec == P(("fsdp",))
    assert Parallelism(make_mesh(pipe=4)).storage_axes == ("pipe",)
    assert Parallelism(make_mesh(pipe=4)).batch_spec == P()


def test_what_a_user_leaves_out():
    """1F1B with one chunk, two where it is interleaved; and without stages there is nothing to say of them."""

    def chosen(mesh=PIPE, **said):
        parallel = Parallelism(mesh, **said)
        return parallel.schedule, parallel.chunks

    assert chosen() == ("1f1b", 1) and chosen(schedule="zero-bubble") == ("zero-bubble", 1)
    assert chosen(schedule="interleaved") == ("interleaved", 2)
    assert chosen(schedule="interleaved", chunks=3) == ("interleaved", 3)
    assert chosen(DATA) == (None, None) and Parallelism(DATA).gradient_dtype is None and Parallelism(DATA).rules == ()


def test_it_is_a_value():
    """Equal and hashed alike where it says the same, in whichever form; shown with what it says; and frozen."""
    rules = [("up", P(None, "tensor"))]
    said, again = (
        Parallelism(DATA, given, gradient_dtype=of) for given, of in ((rules, "bfloat16"), (tuple(rules), jnp.bfloat16))
    )
    assert said == again and hash(said) == hash(again) and len({said, again, Parallelism(DATA)}) == 2
    assert Parallelism(PIPE) == Parallelism(PIPE, schedule="1f1b", chunks=1) != Parallelism(PIPE, schedule="gpipe")
    assert Parallelism(DATA) == Parallelism(make_mesh(data=2)) != Parallelism(make_mesh(fsdp=2))
    assert dataclasses.replace(said, gradient_dtype=None) == Parallelism(DATA, rules)
    for word in ("Parallelism(mesh=Mesh(", "'data'", "(('up', P", "gradient_dtype=dtype(bfloat16)"):
        assert word in repr(said)
    with pytest.raises(dataclasses.FrozenInstanceError):
        said.mesh = PIPE  # type: ignore[misc]


def test_what_stands_for_one():
    assert as_parallelism(None) is None and as_parallelism(DATA) == Parallelism(DATA) == fp8.Parallelism(DATA)
    parallel = Parallelism(make_mesh(tensor=2), sequence_parallel=True)
    assert as_parallelism(parallel) is parallel


def loss_fn(variables, x):
    return jnp.mean((DENSE.apply(variables, x) - x).astype(jnp.float32) ** 2)


RECIPE = fp8.DelayedScaling(amax_history_len=2)
DENSE, X, TX = fp8.Dense(32, recipe=RECIPE), np.ones((64, 32), np.float32), optax.adam(1e-3)
VARIABLES = jax.eval_shape(DENSE.init, jax.random.key(0), X)
PROGRAMS = {
    "make_train_step": lambda parallel: fp8.make_train_step(loss_fn, TX, RECIPE, parallel=parallel, donate=False).lower(
        jax.eval_shape(lambda: fp8.TrainState.create(variables=DENSE.init(jax.random.key(0), X), tx=TX)), X
    ),
    "value_and_grad": lambda parallel: jax.jit(fp8.value_and_grad(loss_fn, parallel=parallel)).lower(VARIABLES, X),
    "warm_start": lambda parallel: jax.jit(fp8.warm_start(loss_fn, RECIPE, parallel=parallel)).lower(VARIABLES, X),
}


def compiled(name, parallel) -> str:
    return re.sub(r"metadata=\{[^}]*\}", "", PROGRAMS[name](parallel).compile().as_text())


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_bare_mesh_makes_the_program_of_a_parallelism_with_defaults(name):
    mesh = make_mesh(data=2, fsdp=2)
    program = compiled(name, mesh)
    assert program == compiled(name, Parallelism(mesh))
    rules = Parallelism(mesh, [("kernel", P())], gradient_dtype=jnp.bfloat16)
    assert program != compiled(name, rules)  # negative control: options make another one


def test_a_bare_mesh_shards_as_a_parallelism_with_defaults():
    mesh, given = make_mesh(fsdp=2), (DENSE.init, jax.random.key(0), X)
    places = fp8.shardings(*given, parallel=mesh)
    assert places == fp8.shardings(*given, parallel=Parallelism(mesh)) and places["params"]["kernel"].spec == P("fsdp")
    assert places != fp8.shardings(*given, parallel=Parallelism(mesh, [("kernel", P())]))


@pytest.mark.parametrize("option", ["mesh", "rules", "sequence_parallel", "gradient_dtype", "schedule", "chunks"])
def test_options_of_a_mesh_are_no_arguments_of_a_step(option):
    calls = (
        lambda **given: fp8.make_train_step(loss_fn, TX, RECIPE, **given),
        lambda **given: fp8.value_and_grad(loss_fn, **given),
        lambda **given: fp8.warm_start(loss_fn, RECIPE, **given),
        lambda **given: fp8.shardings(DENSE.init, jax.random.key(0), X, parallel=DATA, **given),
    )
    for call in calls:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
            call(**{option: DATA})


@pytest.mark.parametrize("batch", [np.arange(8), jnp.arange(8)], ids=["numpy", "jax"])
def test_a_batch_is_split_by_its_first_dim_and_scalars_are_not(batch):
    placed = Parallelism(make_mesh(data=2, tensor=2)).place_batch({"x": batch, "scale": np.float32(3)}, 1)
    assert sorted(shard.data.tolist() for shard in placed["x"].addressable_shards) == [
        [0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7],
    ]  # fmt: skip
    assert placed["scale"].sharding.is_fully_replicated and placed["scale"] == 3
    again = Parallelism(make_mesh(data=2, tensor=2)).place_batch(placed, 1)
    assert again["x"] is placed["x"]  # what is there already stays where it is


REFUSED = {
    "no mesh": (lambda: Parallelism((4,)), r"mesh must be a jax.sharding.Mesh, got a tuple; make one with"),
    "a number": (lambda: Parallelism(4), r"mesh must be a jax.sharding.Mesh, got a int"),
    "unknown axis": (
        lambda: Parallelism(make_mesh(batch=2)),
        "may have the axes pipe, data, fsdp, expert, tensor, got batch=2; rename or drop batch",
    ),
    "a rule alone": (lambda: Parallelism(DATA, ("up", P())), r"rules must be pairs of a pattern and a PartitionSpec"),
    "a dict of rules": (lambda: Parallelism(DATA, {"up": P()}), "rules must be pairs .* got a dict with 'up'; pass"),
    "a tuple for a spec": (lambda: Parallelism(DATA, (("up", ("fsdp",)),)), "rules must be pairs of a pattern"),
    "sequence without tensor": (
        lambda: Parallelism(DATA, sequence_parallel=True),
        "splits rows over the axis `tensor`, which this mesh does not have, got data=2; add the axis, or leave",
    ),
    "sequence by a word": (lambda: Parallelism(DATA, sequence_parallel="yes"), "sequence_parallel must be True or"),
    "a schedule without stages": (
        lambda: Parallelism(DATA, schedule="gpipe"),
        "schedule and chunks are about the axis `pipe`, which this mesh does not have, got data=2; add the axis, or le",
    ),
    "chunks without stages": (
        lambda: Parallelism(make_mesh(pipe=1, data=2), chunks=2),
        "about the axis `pipe`, which this mesh does not have, got pipe=1,data=2",
    ),
    "an unknown schedule": (
        lambda: Parallelism(PIPE, schedule="2f2b"),
        "must be one of gpipe, 1f1b, interleaved, zero-bubble, got '2f2b'; choose one",
    ),
    "a list for a schedule": (lambda: Parallelism(PIPE, schedule=["1f1b"]), r"one of .*, got \['1f1b'\]; choose"),
    "chunks of a schedule of one": (
        lambda: Parallelism(PIPE, chunks=2),
        "1f1b has one chunk of layers on each stage, got chunks=2; leave it out, or take interleaved",
    ),
    "one chunk, interleaved": (
        lambda: Parallelism(PIPE, schedule="interleaved", chunks=1), "several chunks .*, got chunks=1; pass chunks",
    ),
    "no chunks": (
        lambda: Parallelism(PIPE, schedule="interleaved", chunks=0), "must be a whole number from 1, got 0; pass",
    ),
    "half a chunk": (lambda: Parallelism(PIPE, chunks=1.5), "chunks must be|one chunk of layers on each stage, got"),
    "no pattern": (lambda: Parallelism(DATA, [("up(", P())]), "rules must be pairs of a pattern and a PartitionSpec"),
    "a tuple for a parallelism": (
        lambda: as_parallelism((4,)),
        r"parallel must be a jax.sharding.Mesh or a Parallelism, got a tuple; make a mesh with jax.make_mesh\(\(4,\), ",
    ),
    "a dict of axes": (lambda: as_parallelism({"data": 2}), r"got a dict with 'data'; .*or fp8.Parallelism\(mesh"),
    "a bare mesh of another axis": (lambda: as_parallelism(make_mesh(batch=2)), "got batch=2; rename or drop batch"),
    "stages of a loop of one's own": (
        lambda: Parallelism(make_mesh(pipe=2, data=2)).check_has_no_stages("a loop"),
        "a loop runs whole models, and has no pipeline, got pipe=2,data=2; leave out the axis pipe, or call a step of",
    ),
    "float16": (
        lambda: Parallelism(DATA, gradient_dtype=jnp.float16),
        r"gradient_dtype must be None, jnp.float32 or jnp.bfloat16, got .*float16",
    ),
    "no dtype": (lambda: Parallelism(DATA, gradient_dtype="half"), "must be None, .* got 'half'; None sums"),
    "a word for a dtype": (lambda: Parallelism(DATA, gradient_dtype="small"), "None, .* got 'small'; None sums"),
    "rows": (
        lambda: Parallelism(make_mesh(data=2, fsdp=2)).place_batch({"x": np.zeros((6, 3))}, 1),
        r"as many rows: 4 parts of a batch on the mesh data=2,fsdp=2, got 6 rows of batch\['x'\]; pass a multiple of 4",
    ),
    "rows of a microbatch": (
        lambda: Parallelism(DATA).place_batch(jnp.zeros((6, 3)), 2),
        "as many rows in each of 2 microbatches: 2 parts .*, got 6 rows of batch; pass a multiple of 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_batches_of_jax_arrays_that_lie_elsewhere_are_moved():
    parallel = Parallelism(make_mesh(data=4))
    elsewhere = jax.device_put(np.arange(8), jax.devices()[7])
    assert parallel.place_batch(elsewhere, 2).sharding.device_set == parallel.devices


def test_a_mesh_without_stages_runs_whole_models():
    Parallelism(make_mesh(pipe=1, data=2)).check_has_no_stages("a loop")


def test_axes_in_words():
    assert list(parse_axes("tensor=2, data=3").items()) == [("data", 3), ("tensor", 2)]
    assert list(parse_axes("tensor=2,pipe=3").items()) == [("pipe", 3), ("tensor", 2)]


@pytest.mark.parametrize("text", ["", "stage=2", "data", "data=0", "data=-1", "data=2,data=2", "data=2,", "data=x"])
def test_axes_that_are_none(text):
    words = r"axes among pipe, data, fsdp, expert, tensor, each once .*, got .*; say data=2,tensor=4"
    with pytest.raises(ValueError, match=words):
        parse_axes(text)
