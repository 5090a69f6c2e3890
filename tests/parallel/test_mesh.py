"""The axes of a mesh: what they split, which meshes and rules are refused, and how a batch is placed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import make_mesh
from jax.sharding import PartitionSpec as P

from jax_fp8.core.shards import TensorParallel
from jax_fp8.parallel.mesh import Parallelism, describe_mesh, parse_axes

pytestmark = pytest.mark.versions

DATA = make_mesh(data=2)


def test_what_each_axis_is_for():
    how = Parallelism(make_mesh(data=2, fsdp=2, tensor=2), sequence=True)
    assert how.batch_axes == ("data", "fsdp") and how.batch_parts == 4 and how.size("tensor") == 2
    assert how.tensor == TensorParallel("tensor", 2, sequence=True)
    assert how.batch_spec == P(("data", "fsdp")) and describe_mesh(how.mesh) == "data=2,fsdp=2,tensor=2"


def test_axes_of_one_device_are_none():
    how = Parallelism(make_mesh(pipe=1, data=1, tensor=1))
    assert how.batch_axes == () and how.batch_parts == 1 and how.tensor is None and how.batch_spec == P()
    assert how.stages == 1 and how.storage_axes == () and how.storage_parts == 1


def test_stages_split_params_as_fsdp_does_and_not_the_batch():
    how = Parallelism(make_mesh(pipe=2, fsdp=2, tensor=2))
    assert how.stages == 2 and how.storage_axes == ("fsdp", "pipe") and how.storage_parts == 4
    assert how.batch_axes == ("fsdp",) and how.batch_parts == 2 and how.batch_spec == P(("fsdp",))
    assert Parallelism(make_mesh(pipe=4)).storage_axes == ("pipe",)
    assert Parallelism(make_mesh(pipe=4)).batch_spec == P()


def test_what_a_user_leaves_out():
    """1F1B with one chunk, two where it is interleaved; and without stages there is nothing to say of them."""
    mesh = make_mesh(pipe=2)
    assert Parallelism.of(None) is None

    def chosen(**said):
        how = Parallelism.of(mesh, **said)
        return how.schedule, how.chunks

    assert chosen() == ("1f1b", 1) and chosen(schedule="zero-bubble") == ("zero-bubble", 1)
    assert chosen(schedule="interleaved") == ("interleaved", 2)
    assert chosen(schedule="interleaved", chunks=3) == ("interleaved", 3)
    assert chosen(schedule="interleaved", chunks=0) == ("interleaved", 0)  # for the schedule to refuse
    how = Parallelism.of(DATA, (("up", P()),), False, jnp.bfloat16)
    assert how == Parallelism(DATA, (("up", P()),), gradient_dtype=jnp.bfloat16)


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
        "may have the axes pipe, data, fsdp, tensor, got batch=2; rename or drop batch",
    ),
    "a rule alone": (lambda: Parallelism(DATA, ("up", P())), r"rules must be pairs of a pattern and a PartitionSpec"),
    "a dict of rules": (lambda: Parallelism(DATA, {"up": P()}), "rules must be pairs .* got a dict with 'up'; pass"),
    "a tuple for a spec": (lambda: Parallelism(DATA, (("up", ("fsdp",)),)), "rules must be pairs of a pattern"),
    "sequence without tensor": (
        lambda: Parallelism(DATA, sequence=True),
        "splits rows over the axis `tensor`, which this mesh has not, got data=2; add the axis, or leave",
    ),
    "sequence by a word": (lambda: Parallelism(DATA, sequence="yes"), "sequence_parallel must be True or False, got"),
    "a schedule without stages": (
        lambda: Parallelism.of(DATA, schedule="gpipe"),
        "schedule and chunks are about the axis `pipe`, which this mesh has not, got data=2; add the axis, or leave th",
    ),
    "chunks without stages": (
        lambda: Parallelism.of(make_mesh(pipe=1, data=2), chunks=2),
        "about the axis `pipe`, which this mesh has not, got pipe=1,data=2",
    ),
    "a schedule without a mesh": (
        lambda: Parallelism.of(None, schedule="1f1b"),
        r"rules, sequence_parallel, gradient_dtype, schedule and chunks are about a mesh, got none; pass mesh=jax",
    ),
    "chunks without a mesh": (lambda: Parallelism.of(None, chunks=1), "schedule and chunks are about a mesh, got none"),
    "rules without a mesh": (lambda: Parallelism.of(None, [("up", P())]), "rules, .* are about a mesh, got none; pass"),
    "stages of a loop of one's own": (
        lambda: Parallelism(make_mesh(pipe=2, data=2)).check_has_no_stages("a loop"),
        "a loop runs whole models, and has no pipeline, got pipe=2,data=2; leave out the axis pipe, or call a step of",
    ),
    "float16": (
        lambda: Parallelism(DATA, gradient_dtype=jnp.float16),
        r"gradient_dtype must be None, jnp.float32 or jnp.bfloat16, got .*float16",
    ),
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
    how = Parallelism(make_mesh(data=4))
    elsewhere = jax.device_put(np.arange(8), jax.devices()[7])
    assert how.place_batch(elsewhere, 2).sharding.device_set == how.devices


def test_a_mesh_without_stages_runs_whole_models():
    Parallelism(make_mesh(pipe=1, data=2)).check_has_no_stages("a loop")


def test_axes_in_words():
    assert list(parse_axes("tensor=2, data=3").items()) == [("data", 3), ("tensor", 2)]
    assert list(parse_axes("tensor=2,pipe=3").items()) == [("pipe", 3), ("tensor", 2)]


@pytest.mark.parametrize("text", ["", "stage=2", "data", "data=0", "data=-1", "data=2,data=2", "data=2,", "data=x"])
def test_axes_that_are_none(text):
    words = r"axes among pipe, data, fsdp, tensor, each once .*, got .*; say data=2,tensor=4"
    with pytest.raises(ValueError, match=words):
        parse_axes(text)
