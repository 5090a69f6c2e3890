"""The two programs of text generation, as functions: prompts → first tokens; a token of each row → the next ones.

    prompts ─Decoder.begin→ Turn, caches ─Decoder.advance→ Turn, caches ─Decoder.advance→ ...

A decoder is a tree of arrays: the cast weights, and how tokens are chosen. `generate` runs both functions in one
program; with `stream=True` each is a program of its own, and the host sees every token.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from jax_fp8.core.types import PyTree, Variables
from jax_fp8.models.gpt import GPT
from jax_fp8.models.reader import Caches, Reader
from jax_fp8.models.sampling import choose_tokens
from jax_fp8.ops.cached_attention import is_token

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Choice:
    """How tokens are chosen, and which end a row; see `choose_tokens`.

    Args:
      keys: random keys (batch,), into which the number of each token is folded; None takes the most likely tokens.
      temperature: f32[].
      top_p: f32[], or None.
      stops: i32[stops], tokens that end their row.
    """

    keys: jax.Array | None
    temperature: PyTree
    top_p: PyTree
    stops: PyTree
    top_k: int | None = field(metadata=STATIC)

    def choose(self, logits: jax.Array, step: jax.Array) -> jax.Array:
        """The tokens i32[batch] with the number `step`, of logits f32[batch, vocab]."""
        keys = None if self.keys is None else jax.vmap(partial(jax.random.fold_in, data=step))(self.keys)
        return choose_tokens(logits, keys, self.temperature, self.top_k, self.top_p)

    def ends(self, tokens: jax.Array) -> jax.Array:
        """Which tokens end their row, bool[batch]."""
        return jnp.any(tokens[:, None] == self.stops[None], axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Turn:
    """The newest token of each row i32[batch], its number i32[], and which rows have ended bool[batch]."""

    tokens: jax.Array
    step: jax.Array
    ended: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decoder:
    """A model with its weights cast, and a choice of tokens."""

    reader: Reader
    choice: Choice

    @classmethod
    def begin(
        cls,
        model: GPT,
        room: int,
        kv_cache_dtype: jax.typing.DTypeLike | None,
        variables: Variables,
        prompt: jax.Array,
        lengths: jax.Array,
        choice: Choice,
    ) -> tuple["Decoder", Turn, Caches]:
        """Cast the weights and read the prompts i32[batch, slots]; the caches have room for `room` new tokens."""
        slots = prompt.shape[1]
        prompt = jnp.where(is_token(lengths, slots), prompt, prompt[:, :1])
        reader = Reader.for_prompts(model, variables, lengths, slots)
        logits, caches = reader.read(prompt, reader.empty_caches(room - 1, kv_cache_dtype), None)
        first = jnp.int32(0)
        tokens = choice.choose(logits, first)
        return cls(reader, choice), Turn(tokens, first, choice.ends(tokens)), caches

    def advance(self, caches: Caches, turn: Turn) -> tuple[Turn, Caches]:
        """Read the newest tokens, and choose the next ones. A row that has ended repeats its last token."""
        logits, caches = self.reader.read(turn.tokens[:, None], caches, turn.step)
        step = turn.step + 1
        tokens = jnp.where(turn.ended, turn.tokens, self.choice.choose(logits, step))
        return Turn(tokens, step, turn.ended | self.choice.ends(tokens)), caches


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Made:
    """A tree that a program returns without those of its leaves that are arguments of the program, which it would copy.

    Args:
      leaves: those that the program made.
      arguments: of each leaf of the tree, its number among the leaves of the arguments; None: made.
      structure: of the tree.
    """

    leaves: list[jax.Array]
    arguments: tuple[int | None, ...] = field(metadata=STATIC)
    structure: PyTree = field(metadata=STATIC)

    @classmethod
    def by_program(cls, tree: PyTree, arguments: PyTree) -> "Made":
        """To be called while the program is traced."""
        numbers = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(arguments))}
        leaves, structure = jax.tree.flatten(tree)
        found = tuple(numbers.get(id(leaf)) for leaf in leaves)
        made = [leaf for leaf, number in zip(leaves, found, strict=True) if number is None]
        return cls(made, found, structure)

    def with_arguments(self, arguments: PyTree) -> PyTree:
        """The tree, from the arguments with which the program was called."""
        given, made = jax.tree.leaves(arguments), iter(self.leaves)
        leaves = [next(made) if number is None else given[number] for number in self.arguments]
        return jax.tree.unflatten(self.structure, leaves)
