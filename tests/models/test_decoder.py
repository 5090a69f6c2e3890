"""Text generation as users run it: streamed, with keys and values in FP8, from weights that are in FP8 already, and by
the kernel that attends to the cache.
"""

from dataclasses import replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generation import LEARNED, LENGTHS, MODELS, NEW, PROMPT, QWEN, ROTARY, made, shortfall, write

import jax_fp8 as fp8
from jax_fp8.kernels import cached_attention
from jax_fp8.models import generate as generation
from jax_fp8.models import reader
from jax_fp8.models.decoder import Made
from jax_fp8.models.generate import BLOCK
from jax_fp8.models.reader import Reader
from jax_fp8.ops import cached_attention as ops_cached_attention
from jax_fp8.ops.weight_version import version_of


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
def test_a_stream_copies_no_weight():
    """The program that reads the prompts returns what it made: of weights that are frozen already, and params in the
    dtype of the model, nothing.
    """
    model = fp8.GPT(replace(ROTARY, hidden_size=64), recipe=None, dtype=jnp.float32)
    quantized = model.clone(recipe=fp8.CurrentScaling())
    variables = fp8.freeze_kernels(made(model), quantized.recipe, forward=lambda v: quantized.apply(v, PROMPT))
    wanted = write(model, variables)
    begin, found = generation._programs(None, 1).begin, []
    programs = generation._programs(None, 1)._replace(begin=lambda *given: found.append(begin(*given)) or found[-1])
    with mock.patch.object(generation, "_programs", lambda *_: programs):
        stream = fp8.generate(model, variables, PROMPT, lengths=LENGTHS, max_new_tokens=NEW, stream=True)
        np.testing.assert_array_equal(np.stack(list(stream), axis=1), wanted)
    ((kept, _, _),) = found
    assert sum(leaf.nbytes for leaf in kept.leaves) == 0 and len(kept.arguments) > 10
    cast = jax.jit(
        lambda v: Made.by_program({"a": v["a"], "b": v["b"].astype(jnp.bfloat16)}, (v,))
    )  # a negative control
    arguments = {"a": jnp.ones(3), "b": jnp.ones(4)}
    assert [leaf.shape for leaf in cast(arguments).leaves] == [(4,)]
    assert cast(arguments).with_arguments((arguments,))["a"] is arguments["a"]


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


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(QWEN, None), (replace(QWEN, sliding_window=5), fp8.E4M3), (replace(LEARNED, head_dim=16), None)],
    ids=["rotary", "window, FP8", "learned"],
)
def test_one_kernel_attends_to_the_cache(config, dtype, monkeypatch, traced_anew):
    """Also rotates, and writes the new keys and values: the same text. On a CPU its reference runs."""
    model = fp8.GPT(config, recipe=None, dtype=jnp.float32)
    variables = made(model)
    expected = write(model, variables, kv_cache_dtype=dtype)
    found = write(model.clone(logical_axes=True), variables, kv_cache_dtype=dtype)  # another field: traced anew
    assert shortfall(model, variables, found) <= shortfall(model, variables, expected) + 0.02
    assert (found == expected).mean() > 0.8
    attend = cached_attention.attend_to_cache

    def wrong(*rows, **options):
        found = attend(*rows, **options)
        return found._replace(attended=-2 * found.attended)

    monkeypatch.setattr(ops_cached_attention, "attend_to_cache", wrong)
    other = write(model.clone(remat="full"), variables, kv_cache_dtype=dtype)
    assert (other != found).any()  # negative control


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
