"""What a model writes is, token by token, the most likely one after the full pass; drawn, ended and refused as asked.

Exact where mathematics is: in float32, and in FP8 where scales do not depend on what else is read, as those of a state,
or of `CurrentScaling` with an `amax_epsilon` above all amaxes.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_fp8 as fp8
from jax_fp8.core.paths import map_with_names
from jax_fp8.models import decoder, reader
from jax_fp8.models import generate as generation
from jax_fp8.models.generate import BLOCK
from jax_fp8.models.reader import Reader
from jax_fp8.ops.weight_version import version_of

VOCAB, WINDOW, NEW = 64, 32, 10
SHAPE = {"vocab_size": VOCAB, "num_layers": 1, "num_heads": 4, "hidden_size": 32, "max_seq_len": WINDOW}
LEARNED = fp8.GPTConfig(**SHAPE)
ROTARY = fp8.GPTConfig(
    **SHAPE,
    positions="rotary",
    num_kv_heads=2,
    norm="rmsnorm",
    activation="swiglu",
    use_bias=False,
    tie_embeddings=False,
)
QWEN = replace(
    ROTARY,
    num_layers=2,
    rotary_base=5e5,
    rotary_scaling=fp8.RotaryScaling(factor=4.0, original_length=16),
    norm_epsilon=1e-5,
    head_dim=16,
    use_qkv_bias=True,
    qk_norm=True,
)
DELAYED, FIXED = fp8.DelayedScaling(amax_history_len=2), fp8.CurrentScaling(amax_epsilon=16.0)
LENGTHS = np.int32([5, 11, 16])
PROMPT = np.random.default_rng(1).integers(0, VOCAB, (3, 16), np.int32)
MODELS = {
    "learned": fp8.GPT(LEARNED, recipe=None, dtype=jnp.float32),
    "rotary": fp8.GPT(replace(ROTARY, num_layers=2), recipe=None, dtype=jnp.float32),
    "window": fp8.GPT(replace(ROTARY, num_layers=2, sliding_window=5), recipe=None, dtype=jnp.float32),
    "qwen": fp8.GPT(QWEN, recipe=None, dtype=jnp.float32),
    "qwen, delayed": fp8.GPT(replace(QWEN, num_layers=1), recipe=DELAYED, dtype=jnp.float32),
    "delayed": fp8.GPT(ROTARY, recipe=DELAYED, dtype=jnp.float32),
    "block": fp8.GPT(ROTARY, recipe=fp8.BlockScaling(), head_recipe=fp8.BlockScaling(), dtype=jnp.float32),
    "current, FP8 head": fp8.GPT(LEARNED, recipe=FIXED, head_recipe=FIXED, dtype=jnp.float32),
}


def made(model):
    """Random variables, of which nothing is compiled, with scales that suit them."""
    random, tokens = np.random.default_rng(0), jnp.zeros((1, 16), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def draw(names, leaf):
        return jnp.float32(random.normal(names[-1] == "scale", 0.2, leaf.shape))

    params = map_with_names(draw, shapes["params"])
    scales = jnp.float32([1 / 16, 1 / 256, 1])
    state = jax.tree.map(lambda leaf: scales if leaf.ndim == 1 else jnp.zeros(leaf.shape), shapes.get("fp8", {}))
    return {"params": params, **({"fp8": state} if state else {})}


def write(model, variables, prompt=PROMPT, lengths=LENGTHS, **options):
    return np.asarray(fp8.generate(model, variables, prompt, lengths=lengths, **{"max_new_tokens": NEW} | options))


def shortfall(model, variables, written):
    """How much less likely than the most likely one a written token is in the full pass, at most: logits in standard
    deviations.
    """
    text = np.zeros((len(LENGTHS), WINDOW), np.int32)
    for row, length in enumerate(LENGTHS):
        text[row, : length + NEW] = [*PROMPT[row, :length], *written[row]]
    logits = np.asarray(jax.jit(model.apply)(variables, text))
    places = LENGTHS[:, None] - 1 + np.arange(NEW)
    found = np.take_along_axis(logits, places[..., None], axis=1)  # (rows, new, vocab)
    return np.max(found.max(-1) - np.take_along_axis(found, written[..., None], -1)[..., 0]) / found.std()


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
def test_streamed_tokens_are_those_of_one_call(traced_anew):
    """Each is on the host while the next is computed; an iterator need not be read to its end."""
    model = MODELS["delayed"]
    variables, options = made(model), {"temperature": 1.0, "key": jax.random.key(5), "lengths": LENGTHS}
    stream = partial(fp8.generate, model, variables, PROMPT, stream=True, **options)
    whole = write(model, variables, **options)
    parts = list(stream(max_new_tokens=NEW))
    assert all(isinstance(part, np.ndarray) and part.shape == (3,) for part in parts)
    np.testing.assert_array_equal(np.stack(parts, axis=1), whole)
    np.testing.assert_array_equal(next(stream(max_new_tokens=NEW)), whole[:, 0])
    stops = sorted({int(row[4]) for row in whole})
    ended = np.stack(list(stream(max_new_tokens=NEW, stop_tokens=stops)), axis=1)
    last = max(np.isin(whole, stops).argmax(axis=1))
    assert ended.shape[1] == last + 1 < NEW  # with the last row
    np.testing.assert_array_equal(ended, write(model, variables, **options, stop_tokens=stops)[:, : last + 1])
    with pytest.raises(ValueError, match=r"stream=True hands tokens to the host, .* got traced arrays; call generate"):
        jax.jit(lambda variables: list(fp8.generate(model, variables, PROMPT, max_new_tokens=2, stream=True)))(
            variables
        )


@pytest.mark.versions
@pytest.mark.parametrize(("new", "room"), [(1, 1), (2, 9), (9, 9), (10, 17), (129, 129), (130, 257), (300, 385)])
def test_the_room_for_new_tokens(new, room):
    """The first token and whole blocks, so that no token is written behind the end."""
    assert generation._room(new) == room >= new and (room - 1) % BLOCK == 0


@pytest.mark.versions
@pytest.mark.parametrize("name", ["learned", "window", "qwen"])
def test_keys_and_values_in_fp8(name):
    """One byte an element; tokens are those of the full pass but where two are nearly equally likely."""
    model = MODELS[name]
    variables = made(model)
    in_fp8 = write(model, variables, kv_cache_dtype=fp8.E4M3)
    assert shortfall(model, variables, in_fp8) < 0.2  # in standard deviations of logits
    np.testing.assert_array_equal(in_fp8, write(model, variables, kv_cache_dtype=fp8.E4M3))
    cast = jax.eval_shape(lambda: Reader.for_prompts(model, variables, LENGTHS, 16))
    caches = [jax.eval_shape(lambda dtype=dtype: cast.empty_caches(8, dtype)) for dtype in (None, fp8.E4M3)]
    plain, small = (sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(of)) for of in caches)
    width = model.config.features_of_head
    assert small / plain == (width + 4) / (4 * width)


@pytest.mark.versions
@pytest.mark.parametrize("name", ["delayed", "block"])
def test_a_valid_weight_cache_is_not_cast_again(name, monkeypatch, traced_anew):
    model, asked = MODELS[name], []
    variables, cast = made(model), reader.cast_gemms
    wanted = write(model, variables)
    monkeypatch.setattr(reader, "cast_gemms", lambda *given: asked.append(set(given[2])) or cast(*given))
    cache = fp8.cast_weights(variables, model.recipe, forward=lambda v: model.apply(v, PROMPT))
    np.testing.assert_array_equal(write(model, {**variables, "fp8_cache": cache}), wanted)
    assert asked == [set()]
    params = jax.tree.map(lambda x: jnp.roll(x, 1, axis=-1), variables["params"])
    other = {**variables, "params": params}
    fresh = write(model, other)
    assert (fresh != wanted).any()
    np.testing.assert_array_equal(write(model, {**other, "fp8_cache": cache}), fresh)  # stale: the program that casts
    assert asked == [set()]
    changed = model.clone(recipe=fp8.CurrentScaling())
    without_state = {"params": params, "fp8_cache": {**cache, "params_version": version_of(params, cache)}}
    write(changed, without_state)
    assert len(asked[-1]) == 4  # of another recipe


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
