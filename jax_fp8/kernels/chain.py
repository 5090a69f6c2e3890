"""Kernels one after another in one custom call, so that each may begin before the one before it has ended.

    ffi_call → reshape → ffi_call → slice → ffi_call        one call of csrc/chain.cc: [kernel, kernel, kernel]

Between two custom calls a GPU waits until the first has ended. Within one, a kernel may start early and have its
weights on their way by the time its rows arrive (programmatic dependent launch). A token of a model of 24 layers is 120
kernels of some microseconds each.

`chained` looks for these kernels in the traced program of a function. A kernel goes into the first chain that it can:
what it reads was there before the chain, or is made in it by a kernel before, whole or as a part that is contiguous.
All else runs before a chain, or after it.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jax_fp8.core.types import PyTree
from jax_fp8.jaxprs.equations import array_of, is_view, variables
from jax_fp8.jaxprs.flat import flat_program, run_equation
from jax_fp8.kernels import extension
from jax_fp8.kernels.chain_casts import with_casts_before
from jax_fp8.kernels.dispatch import kernels_run
from jax_fp8.kernels.few_rows import is_alone

TARGET = "jax_fp8_chain"
# What a chain may call: targets without a state of their own, by the names in csrc/chain.cc.
LINKS = (
    "jax_fp8_activation_amax",
    "jax_fp8_activation_quantize",
    "jax_fp8_amax",
    "jax_fp8_cached_attention",
    "jax_fp8_few_rows_gemm",
    "jax_fp8_norm_amax",
    "jax_fp8_norm_quantize",
    "jax_fp8_quantize",
)
# Whether text generation chains the kernels of a token. On an H200 a token of GPT-3 1.3B takes a quarter less time with
# chains, if there is one prompt.
CHOSEN = True
ALIGNMENT = 16  # bytes; that the address of an array is a multiple of, as kernels want it
# For what looks at the kernels of a program: none is traced in a chain.
in_calls_of_their_own = jax.make_user_context(default_value=False)


def chained(function: Callable) -> Callable:
    """The same function of arrays, whose kernels on a GPU are in as few calls as can be.

    It is for one device and takes no derivative. Elsewhere than on a GPU nothing is changed.
    """

    def traced(*trees: PyTree) -> PyTree:
        if not CHOSEN or in_calls_of_their_own.value or not is_alone() or not kernels_run():
            return function(*trees)
        arrays, tree = jax.tree.flatten(trees)
        program, shapes = jax.make_jaxpr(lambda *leaves: function(*tree.unflatten(leaves)), return_shape=True)(*arrays)
        results = lax.platform_dependent(*arrays, cuda=_in_chains(program), default=jaxpr_as_fun(program))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return traced


class _Place(NamedTuple):
    """Where a part of a kernel's result lies: behind the first bytes of the whole result."""

    base: Var
    offset: int


class _Plan:
    """When each equation of a flat program runs: those of `chains[i]` in one call, behind those of `others[i]`.

    A variable has a turn: of the chain that makes it, or of the first chain that may read it.
    """

    def __init__(self, program: ClosedJaxpr):
        self.chains: defaultdict[int, list[JaxprEqn]] = defaultdict(list)
        self.others: defaultdict[int, list[JaxprEqn]] = defaultdict(list)
        self.places: dict[Var, _Place] = {}  # of the results of kernels, and of parts of them
        self._turns: dict[Var, int] = {}
        self._wholes: dict[Var, Var] = {}  # of which array, made by no kernel, another is a part
        self._updated: defaultdict[int, set[Var]] = defaultdict(set)  # in place, in each chain
        for equation in program.jaxpr.eqns:
            if _is_link(equation):
                self._add_link(equation)
            else:
                self._add_other(equation)

    @property
    def turns(self) -> range:
        return range(1 + max([*self.chains, *self.others], default=-1))

    def _add_link(self, equation: JaxprEqn) -> None:
        read = variables(equation.invars)
        updated = [equation.invars[number] for number, _ in equation.params["input_output_aliases"]]
        turn = max((self._turns.get(var, 0) for var in read), default=0)
        for var in variables([*updated, *_read_early(equation)]):
            if var in self.places:  # what a chain has made is not written over in it, and not read before it is there
                turn = max(turn, self._turns[var] + 1)
        while not self._updated[turn].isdisjoint(map(self._whole, read)):
            turn += 1
        self.chains[turn].append(equation)
        self._updated[turn].update(map(self._whole, variables(updated)))
        for var in equation.outvars:
            self.places[var], self._turns[var] = _Place(var, 0), turn

    def _add_other(self, equation: JaxprEqn) -> None:
        read, parts = variables(equation.invars), _parts(equation)
        if parts is not None and read and read[0] in self.places:
            parts = [self.places[read[0]].offset + part for part in parts]
            parts = None if any(part % ALIGNMENT for part in parts) else parts
        turn = max((self._turns.get(var, 0) + (var in self.places) for var in read), default=0)
        self.others[turn].append(equation)
        for number, var in enumerate(equation.outvars):
            self._turns[var] = turn
            if parts is None or not read:
                continue
            if read[0] in self.places:  # which the same chain can read
                self.places[var], self._turns[var] = _Place(self.places[read[0]].base, parts[number]), turn - 1
            else:
                self._wholes[var] = self._whole(read[0])

    def _whole(self, var: Var) -> Var:
        return self._wholes.get(var, var)


def _read_early(equation: JaxprEqn) -> Sequence[Var | Literal]:
    """What a kernel reads before it waits for those before it: no kernel of the same chain may make it."""
    if equation.params["target_name"] == "jax_fp8_cached_attention":  # the caches, too, which it updates
        return [*equation.invars[5:7], *equation.invars[11:]]  # lengths, step and the scale of the result
    if equation.params["target_name"] != "jax_fp8_few_rows_gemm":
        return ()
    attributes = dict(equation.params["attributes"])
    late = [0, 2]  # a and its scale
    late += [4 + attributes["has_bias"]] if attributes["has_c"] else []
    late += [len(equation.invars) - 1] if attributes["casts_d"] else []  # the scale of the result
    return [operand for number, operand in enumerate(equation.invars) if number not in late]


def _is_link(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "ffi_call" and equation.params["target_name"] in LINKS


def _parts(equation: JaxprEqn) -> list[int] | None:
    """Where the results of an equation begin in its first operand, in bytes, if they are contiguous parts of it; None
    for an equation that computes or moves something.
    """
    if not equation.invars:
        return None
    name, params, source = equation.primitive.name, equation.params, array_of(equation.invars[0])
    results = [*map(array_of, equation.outvars)]
    if any(result.dtype != source.dtype for result in results):
        return None
    item = source.dtype.itemsize
    if is_view(equation):
        return [0]
    if name == "slice" and params["strides"] is None:
        return _slice(source.shape, [(params["start_indices"], results[0].shape)], item)
    if name == "split":
        starts = np.cumsum([0, *params["sizes"][:-1]])
        cuts = [([int(start) * (dim == params["axis"]) for dim in range(source.ndim)], result.shape)
                for start, result in zip(starts, results, strict=True)]  # fmt: skip
        return _slice(source.shape, cuts, item)
    return None


def _slice(shape: Sequence[int], cuts: Sequence[tuple[Sequence[int], Sequence[int]]], item: int) -> list[int] | None:
    """The first byte of each cut (starts, sizes) of a row-major array, if all are contiguous."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for _, sizes in cuts:
        cut = [dim for dim, size in enumerate(sizes) if size != shape[dim]]
        if cut and any(size != 1 for size in sizes[: cut[-1]]):
            return None
    return [sum(start * stride for start, stride in zip(starts, strides, strict=True)) * item for starts, _ in cuts]


def _in_chains(program: ClosedJaxpr) -> Callable:
    """The program as CUDA runs it, with its kernels in chains."""
    flat = with_casts_before(flat_program(program, "cuda"))
    plan = _Plan(flat)

    def run(*arrays: jax.Array) -> list[jax.Array]:
        values = dict(zip([*flat.jaxpr.constvars, *flat.jaxpr.invars], [*flat.consts, *arrays], strict=True))
        for turn in plan.turns:
            links = plan.chains[turn]
            is_chain = len(links) > 1
            for equation in [*plan.others[turn], *(() if is_chain else links)]:
                run_equation(flat.jaxpr, equation, values)
            if is_chain:
                values.update(_call(links, plan, values))
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in flat.jaxpr.outvars]

    return run


def _call(links: Sequence[JaxprEqn], plan: _Plan, values: dict[Var, jax.Array]) -> dict[Var, jax.Array]:
    """The custom call of a chain, and the results of its kernels.

    The attribute `arrays` describes the operands and results of each kernel, as csrc/chain.cc reads it: how many of
    each there are, and for each of them the number of the call's operand, or below 0 of its result, the first byte
    there, XLA's number of the dtype, the rank and the dims.
    """
    extension.check_target(TARGET)
    operands: list[jax.Array] = []
    number_of: dict[object, int] = {}
    results = {var: -1 - number for number, var in enumerate(var for link in links for var in link.outvars)}
    aliases: dict[int, int] = {}
    arrays: list[int] = []

    def operand(atom: Var | Literal, is_updated: bool) -> tuple[int, int]:
        """Its number and its first byte. One that a kernel has updated before is another operand than that."""
        if isinstance(atom, Var) and atom in plan.places and plan.places[atom].base in results:
            base, offset = plan.places[atom]
            return results[base], offset
        key = atom if isinstance(atom, Var) else id(atom)
        if key not in number_of or (is_updated and number_of[key] in aliases):
            number_of[key] = len(operands)
            operands.append(values[atom] if isinstance(atom, Var) else jnp.asarray(atom.val))
        return number_of[key], 0

    for link in links:
        arrays += [len(link.invars), len(link.outvars)]
        updated = dict(link.params["input_output_aliases"])
        for position, atom in enumerate(link.invars):
            number, first = operand(atom, position in updated)
            arrays += [number, first, *_type(atom)]
            if position in updated:
                aliases[number] = -1 - results[link.outvars[updated[position]]]
        for var in link.outvars:
            arrays += [results[var], 0, *_type(var)]
    call = jax.ffi.ffi_call(
        TARGET,
        [*map(array_of, results)],
        input_output_aliases=aliases,
    )
    attributes = {f"link_{number:04}": dict(link.params["attributes"]) for number, link in enumerate(links)}
    targets = " ".join(link.params["target_name"] for link in links)
    found = call(*operands, targets=targets, arrays=np.array(arrays, np.int64), **attributes)
    return dict(zip(results, found, strict=True))


# As XLA's FFI numbers dtypes (xla/ffi/api/c_api.h).
DTYPES = {
    "bool": 1, "int8": 2, "int32": 4, "uint8": 6, "uint16": 7, "uint32": 8, "float16": 10, "float32": 11,
    "bfloat16": 16, "float8_e5m2": 19, "float8_e4m3fn": 20,
}  # fmt: skip


def _type(atom: Var | Literal) -> list[int]:
    array = array_of(atom)
    return [DTYPES[array.dtype.name], len(array.shape), *array.shape]
