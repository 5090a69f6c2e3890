"""Transformations that nest a function in a jaxpr (scan, cond, custom_vjp, ...). Each takes an elementwise function f
of an array, and returns a function of the same type that calls f. Tests of jaxpr walkers try all of them.
"""

import math
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

Function = Callable[[jax.Array], jax.Array]
TURNS = 3


def in_a_scan(f: Function) -> Function:
    return lambda x: lax.scan(lambda x, _: (f(x), None), x, length=TURNS)[0]


def in_a_while_loop(f: Function) -> Function:
    def run(x):
        return lax.while_loop(lambda carry: carry[0] < TURNS, lambda carry: (carry[0] + 1, f(carry[1])), (0, x))[1]

    return run


def in_a_branch(f: Function) -> Function:
    return lambda x: lax.cond(x.sum() > 0, f, lambda x: x, x)


def with_a_vjp(f: Function) -> Function:
    function = jax.custom_vjp(f)
    function.defvjp(lambda x: (f(x), x), lambda x, dy: (dy,))
    return function


def with_a_jvp(f: Function) -> Function:
    function = jax.custom_jvp(f)
    function.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return function


def on_shards(f: Function) -> Function:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("shards",))
    return jax.shard_map(f, mesh=mesh, in_specs=P("shards"), out_specs=P("shards"))


HOLDERS: dict[str, Callable[[Function], Function]] = {
    "scan": in_a_scan,
    "while": in_a_while_loop,
    "cond": in_a_branch,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "custom_vjp": with_a_vjp,
    "custom_jvp": with_a_jvp,
    "shard_map": on_shards,
}
# How often f runs, as far as the jaxpr tells; and the holders that pass f their operands and return its results.
COUNTS = {name: {"scan": TURNS, "while": math.inf}.get(name, 1) for name in HOLDERS}
CALLS = [name for name in HOLDERS if name not in ("scan", "while", "cond")]
