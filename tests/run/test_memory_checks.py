"""What is refused because a device has no room for it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_fp8.models.config import GPTConfig
from jax_fp8.run import memory_checks
from jax_fp8.run.devices import make_mesh
from jax_fp8.run.settings import Settings
from jax_fp8.state.train_state import TrainState


def test_moments_of_few_bits_need_less_memory(monkeypatch):
    """Params have 4 bytes and moments 8, or 2: between both a model fits only with these."""
    config = GPTConfig.preset("gpt2-124m")
    monkeypatch.setattr(memory_checks, "_memory", lambda mesh: 124e6 * 9)
    memory_checks.check_memory(Settings(mu_dtype="float8_e4m3fn", nu_dtype="float8_e5m2"), make_mesh("data=1"), config)
    with pytest.raises(ValueError, match=r"params and optimizer state must fit into 1\.0 GiB"):
        memory_checks.check_memory(Settings(), make_mesh("data=1"), config)


@pytest.mark.parametrize("frozen", [{"lora": 4}, {"freeze": "embedding"}])
def test_the_state_counts_where_params_are_frozen(monkeypatch, frozen):
    """The optimizer then has fewer moments than the model has params."""
    monkeypatch.setattr(memory_checks, "_memory", lambda mesh: 1024)
    memory_checks.check_memory(Settings(**frozen), make_mesh("data=1"), GPTConfig.preset("gpt2-124m"))
    with pytest.raises(ValueError, match="params and optimizer state must fit into"):
        memory_checks.check_memory(Settings(), make_mesh("data=1"), GPTConfig.preset("gpt2-124m"))


def test_a_device_needs_room_for_its_part(monkeypatch):
    """512 floats on one device, or half of them on each of two."""
    monkeypatch.setattr(memory_checks, "_memory", lambda mesh: 1100)
    for axes, fits in (("data=1", False), ("fsdp=2", True)):
        mesh = make_mesh(axes)
        sharding = None if axes == "data=1" else NamedSharding(mesh, PartitionSpec("fsdp"))
        param = jax.ShapeDtypeStruct((512,), jnp.float32, sharding=sharding)
        state = TrainState(jax.ShapeDtypeStruct((), jnp.int32), {"kernel": param}, {}, ())
        if fits:
            memory_checks.check_state(state, mesh)
            continue
        with pytest.raises(ValueError, match=r"params and optimizer state must fit into .* by --mesh fsdp=8"):
            memory_checks.check_state(state, mesh)
