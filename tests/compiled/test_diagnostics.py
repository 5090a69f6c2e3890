"""A step that diagnoses, and one that may skip its loss, compiled for an H200 with no GPU.

Each is one CUDA graph as before, of the same kernels, and copies nothing; what is measured comes from reductions that
read a tensor once.
"""

import functools
from types import SimpleNamespace

import h200
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.kernels import extension
from jax_fp8.train.cuda_graph import CUDA_GRAPH_OPTIONS

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
CONFIG = fp8.GPTConfig(vocab_size=512, num_layers=1, num_heads=4, hidden_size=256, max_seq_len=2048)
RECIPE = fp8.DelayedScaling(amax_history_len=16)
TOKENS = 8 * 2048  # of which 2,048 rows are measured
KERNELS_FOR_A_LAYER = 120  # beside those of a plain step; launches are what this costs


@functools.cache
def program(diagnose: bool = False, skip_above: float | None = None) -> h200.Program:
    model = fp8.GPT(CONFIG, recipe=RECIPE)
    step = fp8.make_train_step(
        fp8.next_token_loss(model), fp8.fused_adamw(1e-3), RECIPE, compiler_options=CUDA_GRAPH_OPTIONS
    )
    on = h200.on_one_device()
    state = h200.shapes(step.state_shapes(model.init, jax.random.key(0), jnp.zeros((8, 2048), jnp.int32)), on)
    tokens = h200.shapes(jax.ShapeDtypeStruct((8, 2049), jnp.int32), on)
    options = {"diagnose": diagnose, "skip_above": skip_above}
    return h200.compile(SimpleNamespace(lower=lambda *args: step.lower(*args, **options)), state, tokens)


def launched(found: h200.Program) -> int:
    return sum(i.launches and i.in_entry for i in found.instructions)


def large(found: h200.Program) -> list[str]:
    return [str(copy) for copy in found.copies if copy.results[0].bytes >= CONFIG.hidden_size**2]


@pytest.mark.parametrize("options", [{"diagnose": True}, {"skip_above": 4.0}], ids=["diagnose", "skip"])
def test_it_is_one_graph_of_the_same_kernels_and_copies_nothing(options):
    found, plain = program(**options), program()
    assert (found.graphs, dict(found.outside_graphs)) == (1, {})
    assert found.custom_calls == plain.custom_calls
    assert large(found) == large(plain) == []
    assert found.aliased_bytes > plain.aliased_bytes  # what it says is written over zeros, too


def test_what_is_measured_is_a_sample_in_few_launches():
    found, plain = program(diagnose=True), program()
    whole = [str(i) for i in found.making("f32", TOKENS, CONFIG.hidden_size * 4)]
    assert len(whole) == len(plain.making("f32", TOKENS, CONFIG.hidden_size * 4))
    assert 0 < launched(found) - launched(plain) < KERNELS_FOR_A_LAYER
    assert found.temp_bytes < 1.05 * plain.temp_bytes


def test_a_limit_of_the_loss_costs_no_pass():
    found, plain = program(skip_above=4.0), program()
    assert launched(found) <= launched(plain) + 4
    assert found.temp_bytes < 1.01 * plain.temp_bytes
