"""What a model writes is, token by token, the most likely one after the full pass; drawn, ended and refused as asked.

Exact where mathematics is: in float32, and in FP8 where scales do not depend on what else is read, as those of a state,
or of `CurrentScaling` with an `amax_epsilon` above all amaxes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation import LENGTHS, MODELS, NEW, PROMPT, VOCAB, made, shortfall, write
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_fp8 as fp8
from jax_fp8.models import decoder, reader
from jax_fp8.models.generate import BLOCK
from jax_fp8.ops import passes

ON_VERSIONS = {"qwen, delayed", "learned"}  # a second jax has the same loop for all


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.versions if name in ON_VERSIONS else ()) for name in MODELS]
)
def test_every_token_is_the_most_likely_one_after_the_full_pass(name):
    model = MODELS[name]
    variables = made(model)
    written = write(model, variables)
    assert len(np.unique(written)) > 8
    # In FP8 a sum in another order may round a number to its neighbour.
    assert shortfall(model, variables, written) <= (0 if model.recipe is None else 0.02)
    if name == "learned":
        changed = np.where(np.arange(NEW) == 4, (written + 1) % VOCAB, written)
        assert shortfall(model, variables, changed) > 0.1  # negative control


@pytest.mark.versions
def test_a_cache_that_is_off_by_one_is_found(monkeypatch, traced_anew):
    """In positions; tests/ops/test_cached_attention.py moves slots."""
    right = reader.positions_of

    def wrong(lengths, slots, step):
        return right(lengths, slots, step) + (step is not None)

    monkeypatch.setattr(reader, "positions_of", wrong)
    variables = made(MODELS["learned"])
    assert shortfall(MODELS["learned"], variables, write(MODELS["learned"], variables)) > 0.1


@pytest.mark.versions
def test_a_row_is_what_it_is_alone():
    """With keys of their own, rows of several lengths: each drawn as if it were the only one."""
    model = MODELS["delayed"]
    variables, keys = made(model), jax.random.split(jax.random.key(3), 3)
    options = {"temperature": 1.0, "top_k": 20, "top_p": 0.9}
    together = write(model, variables, key=keys, **options)
    for row in range(3):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(
            write(model, variables, PROMPT[one], LENGTHS[one], key=keys[one], **options)[0], together[row]
        )
    assert (together != write(model, variables, key=keys[::-1], **options)).mean() > 0.5
    raw = write(model, variables, key=jax.random.PRNGKey(3), **options)
    np.testing.assert_array_equal(raw, write(model, variables, key=jax.random.key(3), **options))


@pytest.mark.versions
def test_one_program_and_stops(monkeypatch, traced_anew):
    """Lengths, temperatures and stop tokens are no part of the program, nor is the number of new tokens within its
    room; it ends with the block of the last row.
    """
    model, counts = MODELS["learned"], {"traced": 0, "chosen": 0}
    variables, choose = made(model), decoder.choose_tokens

    def counted(logits, *options):
        counts["traced"] += 1
        jax.debug.callback(lambda: counts.update(chosen=counts["chosen"] + 1))
        return choose(logits, *options)

    monkeypatch.setattr(decoder, "choose_tokens", counted)
    options, unused = {"temperature": 0.7, "key": jax.random.key(1)}, VOCAB - 1
    free = write(model, variables, stop_tokens=[unused], **options)
    traced = counts["traced"]
    assert unused not in free
    stop = free[0, 2]
    ended = write(model, variables, stop_tokens=[stop], **options)
    for row, whole in zip(ended, free, strict=True):
        end = [*whole, stop].index(stop) + 1
        np.testing.assert_array_equal(row, [*whole[:end], *[stop] * (NEW - end)])

    def steps(stop):
        """Of three rows that are alike."""
        counts["chosen"] = 0
        rows = PROMPT[[0, 0, 0]], [5, 5, 5]
        found = write(model, variables, *rows, stop_tokens=[stop], temperature=1.0, key=jnp.stack([options["key"]] * 3))
        jax.effects_barrier()
        return counts["chosen"], found[0]

    whole, row = steps(unused)
    assert whole == 1 + 2 * BLOCK and unused not in row
    assert list(row).index(row[3]) <= BLOCK and steps(row[3])[0] == 1 + BLOCK

    np.testing.assert_array_equal(
        write(model, variables, stop_tokens=[unused], **options | {"max_new_tokens": NEW + 2})[:, :NEW], free
    )
    write(model, variables, PROMPT[:, :13], LENGTHS - 3, stop_tokens=[7], **options)  # padded to as many
    assert counts["traced"] == traced
    write(model, variables, np.tile(PROMPT, 2)[:, :20], None, stop_tokens=[7], **options)
    assert counts["traced"] > traced  # negative control: 20 tokens are padded to 32


@pytest.mark.versions
def test_on_a_mesh_with_explicit_axes():
    model = MODELS["learned"]
    variables = made(model)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)

    def place(param):
        spec = PartitionSpec(None, "tensor") if param.ndim == 2 else PartitionSpec()
        return jax.device_put(param, NamedSharding(mesh, spec))

    on_mesh = fp8.generate(model, jax.tree.map(place, variables), PROMPT, lengths=LENGTHS, max_new_tokens=NEW)
    assert on_mesh.sharding.is_fully_replicated
    with pytest.raises(ValueError, match=r"stream=True needs variables on a mesh with Auto axes, got .*Explicit"):
        fp8.generate(model, jax.tree.map(place, variables), PROMPT, max_new_tokens=NEW, stream=True)
    np.testing.assert_array_equal(on_mesh, write(model, variables))


@pytest.mark.versions
def test_prompts_of_every_dtype():
    model = MODELS["learned"]
    variables = made(model)
    expected = write(model, variables)
    for dtype in (np.int8, np.uint8, np.uint16, np.int64):
        np.testing.assert_array_equal(write(model, variables, PROMPT.astype(dtype), LENGTHS.astype(dtype)), expected)
    assert (write(model, variables, (PROMPT + 1) % VOCAB) != expected).any()  # negative control


REFUSED = {
    "too long": (
        {"max_new_tokens": 18},
        "must read a prompt and all .* got a prompt of 16 and max_new_tokens=18; cut the",
    ),
    "nothing to write": ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
    "no prompts": ({"prompt": PROMPT[0]}, r"tokens must be an integer array \(batch, seq\), got int32\[16\]"),
    "no token of 8 bits": (
        {"prompt": np.uint8(PROMPT) - np.uint8(100)},
        "prompt must be tokens of the vocabulary, from 0 to 63, got 1",
    ),
    "no token of 64 bits": ({"prompt": PROMPT + np.int64(2**32)}, "prompt must be tokens .* got 42949"),
    "no token": ({"prompt": PROMPT + 60}, "prompt must be tokens of the vocabulary, from 0 to 63, got "),
    "lengths of others": ({"lengths": [3, 4]}, "lengths must be integers, one for each of the 3 prompts, got int64"),
    "an empty prompt": ({"lengths": [0, 4, 4]}, "lengths must be from 1 to 16, the tokens of a row, got 0; leave"),
    "a long length": ({"lengths": [1, 4, 17]}, "lengths must be from 1 to 16, the tokens of a row, got 17"),
    "cold": ({"temperature": -1.0}, "temperature must be a finite number that is not negative, got -1.0"),
    "no key": ({"temperature": 1.0}, r"sampling at temperature 1.0 needs a key, got None; pass jax.random.key\(seed\)"),
    "two keys": (
        {"temperature": 1.0, "key": jax.random.split(jax.random.key(0))},
        r"key must be one random key, or one for each of the 3 prompts, got keys of shape \(2,\)",
    ),
    "no candidates": ({"top_k": 0}, "top_k must be an integer of at least 1, got 0"),
    "no probability": ({"top_p": 0.0}, "top_p must be a finite number above 0 and at most 1, got 0.0"),
    "a stop that is none": (
        {"stop_tokens": [64]},
        "stop_tokens must be tokens of the vocabulary, from 0 to 63, got 64",
    ),
    "keys of two bytes": (
        {"kv_cache_dtype": jnp.bfloat16},
        r"kv_cache_dtype must be None, for the model's dtype, or jax_fp8.E4M3, got .*bfloat16",
    ),
    "a stream of 1": ({"stream": 1}, "stream must be True or False, got 1"),
    "one stop": ({"stop_tokens": [0.5]}, r"stop_tokens must be integers, got \[0.5\]; pass a list of tokens"),
    "no model": ({"model": fp8.Dense(4)}, r"generate needs a GPT, got a Dense; pass GPT\(config\)"),
    "no variables": (
        {"variables": {}},
        'variables must hold "params", got an empty dict; pass what model.init returned',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    options, sentence = REFUSED[name]
    right = {"model": MODELS["learned"], "variables": {"params": {}}, "prompt": PROMPT, "lengths": None}
    with pytest.raises(ValueError, match=sentence):
        fp8.generate(**right | {"max_new_tokens": NEW} | options)


@pytest.mark.parametrize("traced", [False, True], ids=["", "in jax.jit"])
@pytest.mark.parametrize("devices", [1, 2])
def test_weights_that_devices_split_are_not_gathered_for_a_token(devices, traced, monkeypatch):
    """A product with norm, gates or parts needs all columns of its weight: on a mesh none is made."""
    config = fp8.GPTConfig(vocab_size=48, num_layers=1, num_heads=2, hidden_size=32, max_seq_len=32)
    model, prompt = fp8.GPT(config), jnp.array([[1, 2, 3], [4, 5, 6]])
    mesh = jax.make_mesh((devices,), ("tensor",), axis_types=(AxisType.Auto,))
    variables = jax.device_put(jax.jit(model.init)(jax.random.key(0), prompt), NamedSharding(mesh, PartitionSpec()))
    products = []
    multiply = passes.multiply_prepared
    monkeypatch.setattr(
        passes, "multiply_prepared", lambda *args, **how: products.append(how) or multiply(*args, **how)
    )
    generate = partial(fp8.generate, model, max_new_tokens=3)
    (jax.jit(generate) if traced else generate)(variables, prompt=prompt)
    assert bool(products) == (devices == 1)
