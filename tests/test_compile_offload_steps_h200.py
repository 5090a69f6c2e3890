"""Steps of a GPT that offloads, compiled for an H200: scratch falls by what moves, and copies run beside compute.

No layer is so short of compute as here: times mean nothing, the order does.
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

LAYERS, WIDTH, SEQUENCE, BATCH = 6, 512, 1024, 32
CONFIG = fp8.GPTConfig(vocab_size=256, num_layers=LAYERS, num_heads=4, hidden_size=WIDTH, max_seq_len=SEQUENCE)
RECIPE = fp8.DelayedScaling(amax_history_len=2)
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
        tokens = jax.ShapeDtypeStruct((microbatches * BATCH, SEQUENCE + 1), jnp.int32)
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
