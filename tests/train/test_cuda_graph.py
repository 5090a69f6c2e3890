"""What keeps addresses of a step where they are: buffers of the metrics that nothing else uses,
and room for small arrays on GPUs alone.
"""

import re
from types import SimpleNamespace

import flax.linen as nn
import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp8 as fp8
from jax_fp8.kernels import extension
from jax_fp8.parallel.overlap import OVERLAP_OPTIONS
from jax_fp8.train import cuda_graph, train_step
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS, ROOM_BYTES, make_room, zero_metrics
from jax_fp8.train.step import TrainStep

REASON = h200.missing_reason() or extension.missing_reason()
RECIPE = fp8.CurrentScaling()
SIZE = 64


class Tower(nn.Module):
    """Layers enough for amaxes to be there when the loss is known."""

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.gelu(fp8.Dense(SIZE, recipe=RECIPE)(x))
        return x


def loss_fn(variables, batch):
    return jnp.mean(jnp.square(Tower().apply(variables, batch).astype(jnp.float32) - 1))


def tower_step(**options) -> TrainStep:
    return fp8.make_train_step(loss_fn, fp8.fused_adamw(1e-3), RECIPE, **options)


def tower_state(batch) -> fp8.TrainState:
    return fp8.TrainState.create(variables=Tower().init(jax.random.key(0), batch), tx=fp8.fused_adamw(1e-3))


def shared_with_results(function, *arguments, folder) -> list[str]:
    """Values in buffers of results that are no arguments:
    new ones every step, which no command of the graph should know. The tuple of all is one.
    """
    options = h200.UNTIMED | {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    function.lower(*arguments).compile(compiler_options=options)
    [path] = folder.glob("*buffer-assignment.txt")
    allocations = re.split(r"^allocation ", path.read_text(), flags=re.MULTILINE)[1:]
    results = [text for text in allocations if "maybe-live-out" in text.splitlines()[0] and ", parameter " not in text]
    values = [value for text in results for value in re.findall(r"^ value: <\d+ (\S+)", text, flags=re.MULTILINE)]
    return [value for value in values if not value.startswith("tuple")]


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_metrics_share_their_buffers_with_nothing(tmp_path):
    step = tower_step(compiler_options=CUDA_GRAPH_OPTIONS)
    batch = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.bfloat16)
    state, batch = h200.shapes((jax.eval_shape(tower_state, batch), batch), h200.on_one_device())
    folders = [tmp_path / name for name in ("step", "control")]
    assert shared_with_results(step, state, batch, folder=folders[0]) == []

    inner = tower_step(compiler_options={})  # in a program of another its zeros are constants
    without_zeros = jax.jit(inner.__call__, donate_argnums=0, compiler_options=CUDA_GRAPH_OPTIONS)
    assert len(shared_with_results(without_zeros, state, batch, folder=folders[1])) > len(zero_metrics())


@pytest.mark.filterwarnings("error:Some donated buffers")
@pytest.mark.parametrize("remat", ["none", "full", "offload:1"])
def test_a_step_that_offloads_may_have_all_its_copies_under_way(monkeypatch, remat):
    """And no other step has other options than before."""
    found = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(train_step, "TrainStep", lambda programs, donate, options, warm: found.append(options))
    model = fp8.GPT(fp8.GPTConfig.preset("tiny"), remat=remat)
    for mesh in (None, jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])):
        fp8.make_train_step(fp8.next_token_loss(model), fp8.fused_adamw(1e-3), model.recipe, parallel=mesh)
    extra = cuda_graph.OFFLOAD_OPTIONS if remat.startswith("offload") else {}
    assert found == [CUDA_GRAPH_OPTIONS | extra, CUDA_GRAPH_OPTIONS | OVERLAP_OPTIONS | extra]


def test_zeros_are_added_and_donated():
    batch = jnp.ones((SIZE, SIZE), jnp.bfloat16)
    state, step = tower_state(batch), tower_step()
    expected = loss_fn(state.variables, batch)
    _, metrics = step(state, batch)
    assert metrics.keys() == zero_metrics().keys()
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-3)
    assert metrics["nonfinite_amaxes"] == 0
    assert [metric.dtype for metric in metrics.values()] == [zero.dtype for zero in zero_metrics().values()]


def test_a_cpu_needs_no_room():
    assert make_room(jnp.zeros(())) == []


def test_on_every_gpu_the_first_of_two_arrays_is_given_up(monkeypatch):
    """By a list of what is placed where: two GPUs and a CPU of which none exists."""
    devices = [SimpleNamespace(platform=platform) for platform in ("gpu", "cpu", "gpu")]
    gpus, placed = [devices[0], devices[2]], []

    def place(contents, device):
        placed.append((device, contents.nbytes))
        return len(placed)

    monkeypatch.setattr(cuda_graph.jax, "device_put", place)
    near = SimpleNamespace(sharding=SimpleNamespace(addressable_devices=devices))
    assert make_room(near) == [3, 4]
    assert placed == 2 * [(device, ROOM_BYTES) for device in gpus]
