"""Tokens sorted by expert, and back: the permutations around the GEMMs of a mixture of experts.

    x[token] ─take_rows→ rows in groups, one an expert ─experts→ rows ─combine_rows→ the sum of each token's rows

Every token goes to each of its experts, however many tokens an expert has: none is dropped. Each group begins at a
multiple of 128 rows, and is padded with zeros (kernels/grouped_gemm.py says why). Only the device knows how many rows
the groups need, so the array has the most that they can need: one for each token and choice, and less than 128 more
for each expert. With a capacity the tokens of a device have at most so many rows of each expert. Choices beyond it get
no row, as padding gets none, and the array needs less room.

Both directions are gathers, and each is the other's gradient. No two rows are written to one place, so every sum has a
fixed order, and padding of groups reaches no gradient.

Where a step splits the experts over a mesh axis, rows are sorted on the device of their tokens, without gaps, and
travel to the groups on the devices of their experts (ops/expert_travel.py). On an Explicit mesh that splits the tokens,
each device has all experts and sorts its own tokens, and nothing is sent.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jax_fp8.core.checks import check_number
from jax_fp8.core.shards import ExpertParallel
from jax_fp8.kernels.dispatch import on_shards
from jax_fp8.kernels.explicit import collect, explicit_mesh, explicit_spec, parse_rule
from jax_fp8.kernels.grouped_gemm import GROUP_ROWS
from jax_fp8.kernels.take_rows import take_rows_of_fp8
from jax_fp8.ops.expert_travel import Travel, most_rows, plan_travel, return_rows, send_rows
from jax_fp8.ops.parameters import ParamInfo


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertRows:
    """Which row each token has, and which token each row has.

    Args:
      rows: i32[tokens, choices], the row of a token for each of its experts; the number of rows for choices without a
        row.
      pairs: i32[rows], the token and choice in a row, `token * choices + choice`; `tokens * choices` in rows that pad a
        group, or come after the last one.
      starts: i32[experts + 1], the first row of each group of this device's experts, and where the last one ends.
      dropped: i32[1], how many choices of this device's tokens have no row for want of capacity; None: not known.
      travel: how rows travel from their tokens to the groups; None where the rows of tokens are those of the groups.
    """

    rows: jax.Array
    pairs: jax.Array
    starts: jax.Array
    dropped: jax.Array | None = None
    travel: Travel | None = None


def rows_needed(pairs: int, experts: int, multiple: int = GROUP_ROWS, capacity: int | None = None) -> int:
    """The most rows that `pairs` tokens and choices can take in groups of a multiple of so many, each of at most
    `capacity` of them.
    """
    without_limit = (pairs + (multiple - 1) * min(experts, pairs)) // multiple * multiple
    return without_limit if capacity is None else min(without_limit, experts * -(-capacity // multiple) * multiple)


def capacity_of(factor: float | None, tokens: int, choices: int, experts: int) -> int | None:
    """How many rows of each expert so many tokens may have: `factor` times the mean, rounded up; None: any number."""
    return None if factor is None else math.ceil(factor * tokens * choices / experts)


def check_capacity(name: str, factor: object) -> None:
    """Raise unless it is a capacity factor, or None."""
    if factor is not None:
        check_number(name, factor, "above 0, or None", lambda number: number > 0)


def sort_tokens(
    choices: jax.Array, experts: int, split: ExpertParallel | None = None, capacity_factor: float | None = None
) -> ExpertRows:
    """Rows for tokens whose experts are `choices`, i32[tokens, choices], each from 0 to `experts - 1`, or `experts` for
    padding, which gets no row. The tokens of an expert stay in their order.

    Args:
      split: how experts are split over devices.
      capacity_factor: of each expert's rows from the tokens of a device, as a multiple of the mean; later tokens get no
        row. None: no limit.
    """
    if split is None:
        sort = partial(_sort, experts, GROUP_ROWS, capacity_factor)
        rows, pairs, starts, dropped = on_own_tokens("t c -> t c, r, s, d", sort, choices)
        return ExpertRows(rows, pairs, starts, dropped)
    tokens, of_token = choices.shape
    own_experts, capacity = experts // split.size, capacity_of(capacity_factor, tokens, of_token, experts)
    rows, pairs, starts, dropped = _sort(experts, 1, capacity_factor, choices)
    come = most_rows(tokens, of_token, own_experts, split.size)
    group_rows = rows_needed(come, own_experts, capacity=None if capacity is None else split.size * capacity)
    travel, group_starts = plan_travel(jnp.diff(starts), pairs.size, group_rows, split)
    return ExpertRows(rows, pairs, group_starts, dropped, travel)


def _sort(
    experts: int, multiple: int, capacity_factor: float | None, choices: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """With groups of a multiple of so many rows."""
    tokens, of_token = choices.shape
    capacity = capacity_of(capacity_factor, tokens, of_token, experts)
    chosen = choices.reshape(-1)
    pairs = chosen.size
    order = jnp.argsort(chosen, stable=True)  # pairs, by their experts
    places = jnp.argsort(order)  # of each pair in this order
    expert = jnp.arange(experts, dtype=jnp.int32)
    wanted = jnp.sum(chosen[:, None] == expert[None], axis=0, dtype=jnp.int32)
    counts = wanted if capacity is None else jnp.minimum(wanted, capacity)
    filled_up = (counts + multiple - 1) // multiple * multiple
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(filled_up, dtype=jnp.int32)])
    first = jnp.cumsum(wanted, dtype=jnp.int32) - wanted  # of each expert, in the order of pairs
    row = jnp.arange(rows_needed(pairs, experts, multiple, capacity), dtype=jnp.int32)
    number_in_group = places.astype(jnp.int32) - first.at[chosen].get(mode="clip")
    has_row = (chosen < experts) & (number_in_group < (pairs if capacity is None else capacity))
    rows = jnp.where(has_row, starts[chosen] + number_in_group, row.size)
    of_row = jnp.sum(row[:, None] >= starts[None, 1:-1], axis=1, dtype=jnp.int32)
    number = row - starts[of_row]
    pair = order.at[first[of_row] + number].get(mode="clip").astype(jnp.int32)
    dropped = jnp.sum(wanted - counts, keepdims=True)
    return rows.reshape(choices.shape), jnp.where(number < counts[of_row], pair, pairs), starts, dropped


def take_rows(x: jax.Array, where: ExpertRows) -> jax.Array:
    """The rows (rows, features) of tokens `x` (tokens, features), in groups; zeros where a row has no token."""
    own = take_own_rows(x, where)
    return own if where.travel is None else send_rows(own, where.travel)


def take_own_rows_of_fp8(x: jax.Array, where: ExpertRows, transposes: bool) -> tuple[jax.Array, ...]:
    """The rows (rows, features) of FP8 tokens before they travel, and perhaps their transpose (features, rows)."""

    def take(x: jax.Array, pairs: jax.Array, rows: jax.Array) -> tuple[jax.Array, ...]:
        return take_rows_of_fp8(x, pairs // rows.shape[1], transposes)

    return on_own_tokens("t h, r, t c -> r h" + ", h r" * transposes, take, x, where.pairs, where.rows)


def tokens_with_rows(x: jax.Array, where: ExpertRows) -> jax.Array:
    """`x` (tokens, features) with zeros for tokens that have no row, so that their amax is that of the rows."""

    def keep(x: jax.Array, pairs: jax.Array, rows: jax.Array) -> tuple[jax.Array]:
        return (jnp.where(jnp.any(rows < pairs.size, axis=1, keepdims=True), x, jnp.zeros((), x.dtype)),)

    return on_own_tokens("t h, r, t c -> t h", keep, x, where.pairs, where.rows)[0]


def combine_rows(rows: jax.Array, where: ExpertRows, residual: jax.Array | None = None) -> jax.Array:
    """The sum of each token's rows, (tokens, features) in the dtype of `rows`, added up in float32.

    Args:
      rows: (rows, features), in groups.
      residual: (tokens, features), of the dtype of `rows`, added before the sum is rounded.
    """
    own = rows if where.travel is None else return_rows(rows, where.travel)
    return _combine_own_rows(own, where, residual)


def weights_of_rows(weights: jax.Array, where: ExpertRows) -> jax.Array:
    """The weight of each row, f32[rows], from those of tokens for their choices, f32[tokens, choices]; 0 where a row
    has no token.
    """
    own = _take_own_weights(weights, where)
    return own if where.travel is None else send_rows(own[:, None], where.travel)[:, 0]


def choices_of_rows(of_rows: jax.Array, where: ExpertRows) -> jax.Array:
    """The transpose of `weights_of_rows`: f32[tokens, choices], 0 for choices without a row."""
    own = of_rows if where.travel is None else return_rows(of_rows[:, None], where.travel)[:, 0]
    return _weights_of_choices(own, where)


# ---- of the rows of a device's own tokens ----------------------------------------------------------------------------


@jax.custom_vjp
def take_own_rows(x: jax.Array, where: ExpertRows) -> jax.Array:
    """The rows of `take_rows` before they travel; all of them where none travels."""

    def take(x: jax.Array, pairs: jax.Array, rows: jax.Array) -> tuple[jax.Array]:
        # Rows without a token have a pair past the end, hence a token past the end, which reads as zeros.
        return (x.at[pairs // rows.shape[1]].get(mode="fill", fill_value=0),)

    return on_own_tokens("t h, r, t c -> r h", take, x, where.pairs, where.rows)[0]


@jax.custom_vjp
def _combine_own_rows(rows: jax.Array, where: ExpertRows, residual: jax.Array | None) -> jax.Array:
    def combine(rows: jax.Array, of_tokens: jax.Array, *residual: jax.Array) -> tuple[jax.Array]:
        # Choices without a row have a number past the last one, which reads as zeros.
        terms = [rows.at[of_tokens[:, i]].get(mode="fill", fill_value=0) for i in range(of_tokens.shape[1])]
        first, *others = (term.astype(jnp.float32) for term in (*terms, *residual))
        return (sum(others, first).astype(rows.dtype),)

    added = () if residual is None else (residual,)
    return on_own_tokens(f"r h, t c{', t h' * len(added)} -> t h", combine, rows, where.rows, *added)[0]


@jax.custom_vjp
def _take_own_weights(weights: jax.Array, where: ExpertRows) -> jax.Array:
    def take(weights: jax.Array, pairs: jax.Array) -> tuple[jax.Array]:
        return (weights.reshape(-1).at[pairs].get(mode="fill", fill_value=0),)

    return on_own_tokens("t c, r -> r", take, weights, where.pairs)[0]


def _weights_of_choices(of_rows: jax.Array, where: ExpertRows) -> jax.Array:
    def take(of_rows: jax.Array, of_tokens: jax.Array) -> tuple[jax.Array]:
        return (of_rows.at[of_tokens].get(mode="fill", fill_value=0),)

    return on_own_tokens("r, t c -> t c", take, of_rows, where.rows)[0]


def _take_forward(x: jax.Array, where: ExpertRows):
    return take_own_rows(x, where), (ParamInfo.from_arrays(x), where)


def _take_backward(kept: tuple, drows: jax.Array):
    like, where = kept
    return like.place(_combine_own_rows(drows, where, None)), None


def _combine_forward(rows: jax.Array, where: ExpertRows, residual: jax.Array | None):
    return _combine_own_rows(rows, where, residual), (ParamInfo.from_arrays((rows, residual)), where)


def _combine_backward(kept: tuple, dy: jax.Array):
    (rows_like, residual_like), where = kept
    return rows_like.place(take_own_rows(dy, where)), None, residual_like and residual_like.place(dy)


def _weights_forward(weights: jax.Array, where: ExpertRows):
    return _take_own_weights(weights, where), (ParamInfo.from_arrays(weights), where)


def _weights_backward(kept: tuple, of_rows: jax.Array):
    like, where = kept
    return like.place(_weights_of_choices(of_rows, where)), None


take_own_rows.defvjp(_take_forward, _take_backward)
_combine_own_rows.defvjp(_combine_forward, _combine_backward)
_take_own_weights.defvjp(_weights_forward, _weights_backward)


def on_own_tokens(rule: str, local: Callable[..., tuple[jax.Array, ...]], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Run `local` on each device's own tokens where an Explicit mesh splits them. In the rule the same axes split t
    (tokens), r (rows), s (starts of groups) and d (one number of each device).
    """
    mesh = explicit_mesh(*arrays)
    if mesh is None:
        return local(*arrays)
    inputs, outputs = parse_rule(rule)
    found = collect(inputs, outputs, [explicit_spec(array) for array in arrays])
    axes = found.get("t") or found.get("r")
    return on_shards(mesh, inputs, outputs, dict.fromkeys("trsd", axes) if axes else {}, local, *arrays)
