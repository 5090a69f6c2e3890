"""Steps of a GPT that offloads, compiled for an H200: the scratch falls by what moves, within 10 %, and copies have the
time of the layers between.
"""

import dataclasses
import functools
import re

import h200
import jax
import jax.numpy as jnp
import pytest

import jax_fp8 as fp8
from jax_fp8.kernels import extension
from jax_fp8.train.cuda_graph import default_options

REASON = h200.missing_reason() or extension.missing_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

LAYERS, BATCH = 6, 8
CONFIG = fp8.GPTConfig.preset("gpt3-1.3b", num_layers=LAYERS)
TOKENS, WIDTH = BATCH * CONFIG.max_seq_len, CONFIG.hidden_size
RECIPE = fp8.DelayedScaling(amax_history_len=2)
FORWARD, BACKWARD = 9, 13  # kernels of a layer: products, attention, norms
KERNEL = re.compile(r'custom_call_target="(jax_fp8_(?:gemm|norm)|__cudnn\$fmha)')
COPY = re.compile(r"%(copy-(?:start|done)[\w.]*) = (.*?) copy-(start|done)\(%([\w.-]+)\)")


@dataclasses.dataclass(frozen=True)
class Copy:
    """Where in the schedule it runs, in kernels of layers before its start and before its end."""

    leaves: bool
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Step:
    scratch: int
    on_host: int
    copies: list[Copy]
    kernels: int


@functools.cache
def compiled(remat, microbatches=1, whole=False) -> Step:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91900)
        model = fp8.GPT(CONFIG, recipe=RECIPE, remat=remat)
        loss_fn = fp8.next_token_loss(model.clone(attention_implementation="cudnn"))
        options = default_options(on_mesh=False, offloads=not whole and "offload" in remat)
        step = fp8.make_train_step(
            (lambda variables, tokens: loss_fn(variables, tokens)) if whole else loss_fn,
            fp8.fused_adamw(1e-4),
            RECIPE,
            microbatches,
            compiler_options=options | h200.UNTIMED,
        )
        tokens = jax.ShapeDtypeStruct((microbatches * BATCH, CONFIG.max_seq_len + 1), jnp.int32)
        state = step.state_shapes(model.init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
        on = h200.on_one_device()
        program = step.lower(h200.shapes(state, on), h200.shapes(tokens, on)).compile()
    memory = program.memory_analysis()
    return Step(memory.temp_size_in_bytes, memory.host_temp_size_in_bytes, *copies_of(program.as_text()))


def copies_of(text: str) -> tuple[list[Copy], int]:
    kernels, started, copies = 0, {}, []
    for line in text.splitlines():
        kernels += KERNEL.search(line) is not None
        found = COPY.search(line)
        if found and found[3] == "start":
            started[found[1]] = kernels, re.match(r"\(\w+\[[\d,]*\]\{[^{}]*:S\(5\)\},", found[2]) is not None
        elif found and found[4] in started:
            start, leaves = started[found[4]]
            copies.append(Copy(leaves, start, kernels))
    return copies, kernels


def freed(remat, *options) -> float:
    """How much of what moves to the host is scratch that the step no longer needs."""
    here, there = compiled("none", *options[:1]), compiled(remat, *options)
    assert here.on_host == 0 < there.on_host
    return (here.scratch - there.scratch) / there.on_host


def test_scratch_falls_by_what_moves():
    """Of two of six layers: 21 bytes a token and element of the width."""
    assert compiled("offload:2").on_host == pytest.approx(2 * 21 * TOKENS * WIDTH, rel=0.01)
    assert freed("offload:2") == pytest.approx(1, abs=0.1)


def test_so_it_does_for_a_single_kind():
    assert compiled("offload:2:mlp_hidden").on_host == pytest.approx(2 * 8 * TOKENS * WIDTH, rel=0.01)
    assert freed("offload:2:mlp_hidden") == pytest.approx(1, abs=0.1)


@pytest.mark.slow
def test_and_with_microbatches():
    """Whose weights' gradients are added up by the GEMMs."""
    assert freed("offload:2", 2) == pytest.approx(1, abs=0.1)


@pytest.mark.slow
def test_a_loss_without_layers_leaves_the_order_to_xla():
    """Negative control: it puts copies off until the backward."""
    assert freed("offload:2:mlp_hidden", 1, True) < 0.7


def test_copies_have_the_time_of_the_layers_between():
    """Layers 0 and 3: what 0 keeps begins to leave as it is made, and has left where 3 begins; that of 3 comes back
    beside the backward of 4 and before its own needs it.
    """
    step = compiled("offload:2")
    assert step.kernels == LAYERS * (FORWARD + BACKWARD)
    leave, back = ([copy for copy in step.copies if copy.leaves == leaves] for leaves in (True, False))
    first, second = leave[:9], leave[9:]
    assert len(first) == len(second) == 9 and len(back) == 18
    assert all(copy.start < FORWARD and copy.end == 3 * FORWARD for copy in first)
    assert all(3 * FORWARD < copy.start < 4 * FORWARD and copy.end == 6 * FORWARD for copy in second)
    assert all(copy.start == LAYERS * FORWARD + BACKWARD for copy in back[:9])
    assert all(copy.start == LAYERS * FORWARD + 4 * BACKWARD for copy in back[9:])
    assert all(copy.end > copy.start + BACKWARD // 2 for copy in back)
