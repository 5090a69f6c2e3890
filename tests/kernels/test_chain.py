"""Chains of kernels compute what the kernels do one after another.

No kernel runs here. In their place stands a function of all bytes that a kernel reads and of its attributes, so that a
wrong wire, a wrong part of an array or a wrong attribute changes every number that follows. Casts alone are those of
the kernels, since they may move from one kernel to another.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal
from reference import quantize

import jax_fp8 as fp8
from jax_fp8.core.formats import E4M3
from jax_fp8.jaxprs.equations import array_of
from jax_fp8.jaxprs.flat import flat_program, run_equation
from jax_fp8.kernels import chain
from jax_fp8.kernels.chain import DTYPES, LINKS, TARGET, chained
from jax_fp8.kernels.few_rows import for_devices
from jax_fp8.models.reader import Reader

NAMES = {number: jnp.dtype(name) for name, number in DTYPES.items()}


def kernel(target, attributes, operands, results):
    """Fill the results, arrays of bytes, from all operands."""
    attributes, operands, cast_of_result = dict(attributes), [*operands], None
    if target == "jax_fp8_few_rows_gemm":
        if attributes.pop("casts", False) and attributes["norm"] == "":
            operands[0] = cast(operands[0], operands[2], attributes["a_row"])
        row, casts_result = attributes.pop("d_row", 0), attributes.pop("casts_d", False)
        cast_of_result = (operands.pop(), row) if casts_result else None
    if target == "jax_fp8_cached_attention" and len(operands) > 11:
        scale, row = operands.pop(11), attributes.pop("attended_row")
        cast_of_result = (scale, row) if scale.size else None
    what = repr((target, sorted((name, repr(value)) for name, value in attributes.items())))
    digest = hashlib.sha256(what.encode() + b"".join(operand.tobytes() for operand in operands)).digest()
    random = np.random.default_rng(list(digest))
    for number, result in enumerate(results):
        is_cast = cast_of_result and number == 0
        # Bytes of which no float has an exponent of NaN.
        made = random.integers(0, 56, result.size * (2 if is_cast else 1), np.uint8)
        result[:] = cast(made, *cast_of_result) if is_cast else made


def cast(data, scales, row):
    """Bytes of bfloat16 to those of E4M3."""
    return quantize(data.view(jnp.bfloat16), E4M3, scales.view(np.float32)[row])[0].view(np.uint8)


def as_bytes(array):
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1).copy()


def as_array(data, like):
    return data.view(like.dtype).reshape(like.shape)


def run_kernel(equation, operands):
    params = equation.params
    results = [np.zeros(array_of(var).size * array_of(var).dtype.itemsize, np.uint8) for var in equation.outvars]
    kernel(params["target_name"], params["attributes"], operands, results)
    return results


def run_chain(equation, operands):
    """As csrc/chain.cc reads its attributes. Operands and results that are aliased share their memory."""
    attributes = {name: getattr(value, "val", value) for name, value in equation.params["attributes"]}
    results = [np.zeros(array_of(var).size * array_of(var).dtype.itemsize, np.uint8) for var in equation.outvars]
    for operand, result in equation.params["input_output_aliases"]:
        assert operands[operand].size == results[result].size
        results[result] = operands[operand]
    numbers = iter(attributes["arrays"].tolist())

    def part():
        number, first, dtype, rank = (next(numbers) for _ in range(4))
        size = int(np.prod([next(numbers) for _ in range(rank)], dtype=np.int64)) * NAMES[dtype].itemsize
        whole = operands[number] if number >= 0 else results[-1 - number]
        assert 0 <= first <= first + size <= whole.size
        return whole[first : first + size]

    for number, target in enumerate(attributes["targets"].split()):
        counts = next(numbers), next(numbers)
        reads, writes = ([part() for _ in range(count)] for count in counts)
        kernel(target, dict(attributes[f"link_{number:04}"]).items(), [read.copy() for read in reads], writes)
    assert next(numbers, None) is None
    return results


def run(program, arrays):
    """The results of a flat program, and which calls it made."""
    values = dict(zip(program.jaxpr.invars, arrays, strict=True)) | dict(
        zip(program.jaxpr.constvars, program.consts, strict=True)
    )
    calls = []
    for equation in program.jaxpr.eqns:
        if equation.primitive.name != "ffi_call":
            run_equation(program.jaxpr, equation, values)
            continue
        target = equation.params["target_name"]
        calls.append(target)
        read = [atom.val if isinstance(atom, Literal) else values[atom] for atom in equation.invars]
        results = (run_chain if target == TARGET else run_kernel)(equation, [as_bytes(array) for array in read])
        values |= {var: as_array(data, array_of(var)) for var, data in zip(equation.outvars, results, strict=True)}
    return [atom.val if isinstance(atom, Literal) else values[atom] for atom in program.jaxpr.outvars], calls


def both(function, *arrays):
    """The calls of a function on a GPU with kernels in chains, which must compute the same as without."""
    arrays = [*map(np.asarray, arrays)]
    program = jax.make_jaxpr(function)(*arrays)
    in_chains = jax.make_jaxpr(chain._in_chains(program))(*arrays)
    expected, one_by_one = run(flat_program(program, "cuda"), arrays)
    found, calls = run(in_chains, arrays)
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(as_bytes(one), as_bytes(other))
    linked = sum(len(_links(equation)) for equation in in_chains.jaxpr.eqns)
    assert linked + len(calls) - calls.count(TARGET) == len(one_by_one), "each kernel runs once"
    return calls


def _links(equation):
    if equation.params.get("target_name") != TARGET:
        return []
    return dict(equation.params["attributes"])["targets"].split()


def link(*operands, shape=None, count=1, target=LINKS[0], aliases=None, **attributes):
    first = operands[0]
    results = [jax.ShapeDtypeStruct(shape or first.shape, first.dtype)] * count
    found = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)(*operands, **attributes)
    return found if count > 1 else found[0]


X = np.arange(32, dtype=np.float32).reshape(4, 8)


def test_kernels_one_after_another_are_one_call():
    assert both(lambda x: link(link(link(x), target=LINKS[1]), x, number=np.int32(3)), X) == [TARGET]
    assert both(lambda x: link(x), X) == [LINKS[0]], "one kernel needs no chain"
    assert both(lambda x: x + 1, X) == []


@pytest.mark.parametrize(
    "part",
    [
        lambda y: y.reshape(2, 16),
        lambda y: y[1:3],
        lambda y: y[2:3, 4:7],
        lambda y: y.reshape(-1)[4:11],
        lambda y: jnp.squeeze(y[1:2], 0),
        lambda y: y[None, :, None],
        lambda y: jnp.split(y, [1, 3])[1],
        lambda y: lax.broadcast_in_dim(y, (1, 4, 8), (1, 2)),
    ],
    ids=["reshaped", "rows", "part of a row", "elements", "squeezed", "more dims", "split", "a dim in front"],
)
def test_a_contiguous_part_stays_in_the_chain(part):
    assert both(lambda x: link(link(part(link(x))), x), X) == [TARGET]
    assert both(lambda x: (link(link(part(link(x)))), part(link(x)) * 2), X).count(TARGET) == 1


@pytest.mark.parametrize(
    "moved",
    [lambda y: y.T, lambda y: y[:, 1:3], lambda y: y[::2], lambda y: y + 1, lambda y: y.astype(jnp.bfloat16),
     lambda y: jnp.broadcast_to(y, (2, 4, 8)), lambda y: jnp.split(y, 2, axis=1)[0], lambda y: y.reshape(-1)[1:9]],
    ids=["transposed", "columns", "every second row", "computed", "of another dtype", "repeated",
         "split columns", "at an odd place"],
)  # fmt: skip
def test_what_moves_or_computes_ends_the_chain(moved):
    assert both(lambda x: link(link(moved(link(link(x))))), X) == [TARGET, TARGET]


def test_what_no_kernel_needs_waits():
    """Sums beside the kernels end no chain, and neither do those of which nothing comes."""

    def function(x):
        first = link(x)
        beside = jnp.sin(first)
        second = link(first)
        unused = jnp.cos(second) + beside
        return link(second, jnp.ones(3)), beside, unused[0] * 0

    assert both(function, X) == [TARGET]


def test_a_kernel_before_a_sum_that_needs_it_goes_into_the_first_chain():
    def function(x, y):
        summed = link(link(x)) + 1
        return link(link(summed), y), link(link(y))

    assert both(function, X, X + 1) == [TARGET, TARGET]
    program = jax.make_jaxpr(chain._in_chains(jax.make_jaxpr(function)(X, X)))(X, X)
    assert [len(_links(equation)) for equation in program.jaxpr.eqns if _links(equation)] == [4, 2]


# Of a kernel's first seven operands, those that it reads before it waits for the kernels before it.
@pytest.mark.parametrize(
    ("target", "attributes", "early"),
    [
        ("jax_fp8_few_rows_gemm", {"has_bias": False, "has_c": False, "casts_d": False}, {1, 3, 4, 5, 6}),
        ("jax_fp8_few_rows_gemm", {"has_bias": False, "has_c": True, "casts_d": False}, {1, 3, 5, 6}),
        ("jax_fp8_few_rows_gemm", {"has_bias": True, "has_c": True, "casts_d": False}, {1, 3, 4, 6}),
        ("jax_fp8_few_rows_gemm", {"has_bias": True, "has_c": True, "casts_d": True}, {1, 3, 4}),
        ("jax_fp8_cached_attention", {}, {5, 6}),
        ("jax_fp8_quantize", {}, set()),
    ],
)
def test_what_a_kernel_reads_before_it_waits_comes_from_outside(target, attributes, early):
    if target == "jax_fp8_few_rows_gemm":
        attributes = attributes | {"casts": False, "norm": "", "d_row": 0}
    for position in range(7):
        calls = both(
            lambda x, at=position: link(*[x] * at, link(link(x)), *[x] * (6 - at), target=target, **attributes), X + 1
        )
        assert len(calls) == (2 if position in early else 1), "a chain of two before it, or one of three"


def test_arrays_that_are_updated_in_place():
    update = {"count": 2, "aliases": {1: 1}}

    def once(x, cache):
        y, cache = link(link(x), cache, **update)
        return link(y), cache

    assert both(once, X, X + 1) == [TARGET]
    program = jax.make_jaxpr(chain._in_chains(jax.make_jaxpr(once)(X, X)))(X, X)
    (aliases,) = (equation.params["input_output_aliases"] for equation in program.jaxpr.eqns)
    assert len(aliases) == 1

    def read_before(x, cache):
        return once(link(x, cache), cache)

    def read_later(x, cache):
        y, updated = once(x, cache)
        return link(y, cache.reshape(8, 4)), updated

    def updated_twice(x, cache):
        return once(*once(x, cache))

    def two_of_one(x, cache):
        first, second = once(x, cache), once(x + 1, cache)
        return link(first[0], second[0]), first[1], second[1]

    def both_of_one_kernel(x, cache):
        return link(link(x), cache, cache, count=3, aliases={1: 1, 2: 2})

    assert both(read_before, X, X + 1) == [TARGET]
    assert both(read_later, X, X + 1).count(TARGET) == 1, "the old array is read behind the chain"
    assert both(updated_twice, X, X + 1) == [TARGET, TARGET]
    both(two_of_one, X, X + 1)
    assert both(both_of_one_kernel, X, X + 1) == [TARGET]


LLAMA = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "num_kv_heads": 1, "use_bias": False}
DELAYED = fp8.DelayedScaling(amax_history_len=2)


@pytest.mark.parametrize(
    ("fields", "recipe", "batch"),
    [({}, DELAYED, 1), ({}, fp8.CurrentScaling(), 2), (LLAMA, DELAYED, 8), ({}, DELAYED, 16)],
    ids=["gpt", "current", "llama", "many rows"],
)
def test_a_token_is_one_call(fields, recipe, batch, with_kernels, monkeypatch):
    """All that is between the first GEMM of the first layer and the last one of the last layer."""
    config = fp8.GPTConfig(vocab_size=32, num_layers=3, num_heads=2, hidden_size=32, max_seq_len=32, **fields)
    model, tokens = fp8.GPT(config, recipe=recipe), jnp.zeros((batch, 1), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    reader = jax.eval_shape(lambda variables: Reader.for_prompts(model, variables, jnp.full(batch, 16), 16), variables)
    caches = jax.eval_shape(lambda reader: reader.empty_caches(8), reader)
    leaves, tree = jax.tree.flatten((reader, tokens, caches, jnp.int32(1)))
    random = np.random.default_rng(0)
    arrays = [as_array(random.integers(0, 20, leaf.size * leaf.dtype.itemsize, np.uint8), leaf) for leaf in leaves]

    monkeypatch.setattr(chain, "CHOSEN", False)  # here, since `both` makes the chains

    def read(*arrays):
        reader, *others = tree.unflatten(arrays)
        return reader.read(*others)

    assert both(read, *arrays) == [TARGET]


def test_where_there_are_no_chains(monkeypatch, with_kernels):
    def names(function):
        return [equation.primitive.name for equation in jax.make_jaxpr(function)(X).jaxpr.eqns]

    def function(x):
        return jnp.sin(jnp.cos(x))

    with monkeypatch.context() as patched:
        patched.setattr(chain, "CHOSEN", False)
        assert names(chained(function)) == ["cos", "sin"], "not chosen"
    assert names(for_devices(2, chained(function))) == ["cos", "sin"]
    assert names(chained(function))[-1] == "cond"
    tree = {"a": X, "b": (X + 1, 2.0)}
    found = jax.jit(chained(lambda tree: {"c": tree["a"] + tree["b"][0], "d": [tree["b"][1]]}))(tree)
    assert np.array_equal(found["c"], 2 * X + 1) and found["d"][0] == 2.0


MISTAKES = {
    "a part at the first byte": ("_slice", lambda shape, cuts, item: [0 for _ in cuts]),
    "columns as if they were contiguous": (
        "_slice",
        lambda shape, cuts, item: [
            sum(int(start) * int(np.prod(shape[dim + 1 :])) * item for dim, start in enumerate(starts))
            for starts, _ in cuts
        ],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake, monkeypatch):
    monkeypatch.setattr(chain, *MISTAKES[mistake])
    with pytest.raises(AssertionError):
        both(lambda x: link(link(link(x)[1:3, 4:7])), X)
        both(lambda x: link(link(link(x)[1:3])), X)
