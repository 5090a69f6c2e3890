"""Small models, meshes of CPU devices, and an optimizer that exposes its gradients, for tests of steps on a mesh."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from reference import relative_error

import jax_fp8 as fp8
from jax_fp8.core.formats import OUTPUT_GRADIENT
from jax_fp8.core.state import map_gemms

BATCH, SEQ, VOCAB = 8, 32, 128


def make_mesh(**axes: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices)


def on_devices(function, *args, in_specs, out_specs, **axes: int) -> Any:
    """The result of a `shard_map`ped function on a mesh with these axes."""
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    mesh = jax.sharding.Mesh(np.reshape(devices, tuple(axes.values())), tuple(axes))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped)(*args)


def gpt(recipe, *, dtype=jnp.bfloat16, recompute=False, head_recipe=None, **config) -> fp8.GPT:
    sizes = {"vocab_size": VOCAB, "num_layers": 2, "num_heads": 4, "hidden_size": 128, "max_seq_len": SEQ}
    settings = fp8.GPTConfig(**(sizes | config))
    return fp8.GPT(settings, recipe=recipe, dtype=dtype, recompute=recompute, head_recipe=head_recipe)


def tokens(batch=BATCH, seq=SEQ, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (batch, seq + 1)).astype(np.int32)


def showing(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer whose state begins with the gradients that it received in the last step, in float32."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params),
        lambda gradients, _, params=None: (gradients, jax.tree.map(lambda g: g.astype(jnp.float32), gradients)),
    )
    return optax.chain(keep, tx)


def gradients_of(state: fp8.TrainState) -> Any:
    return state.opt_state[0]


def run(step, state, batch, steps=3) -> tuple[list, list[float]]:
    """The states after each step, on the host, and the losses."""
    states, losses = [], []
    for _ in range(steps):
        state, metrics = step(state, batch)
        states.append(jax.tree.map(np.asarray, state))
        losses.append(float(metrics["loss"]))
    return states, losses


SHOWING = showing(optax.sgd(0.1))


SMALL_GRADIENTS = 2.0**-20


def with_scales(variables) -> dict:
    """Variables with gradient scales that fit the first step; at a scale of 1, gradients of a mean would vanish. A warm
    start would find such scales too, but compile another program for every model and mesh.
    """
    scaled = {
        name: map_gemms(
            lambda gemm: gemm | {"scale": gemm["scale"].at[..., OUTPUT_GRADIENT].set(SMALL_GRADIENTS)}, tree
        )
        for name, tree in variables.items()
        if name == "fp8"
    }
    return dict(variables) | scaled


def first_state(init, x, tx=SHOWING) -> fp8.TrainState:
    def make(key, x):
        return fp8.TrainState.create(variables=with_scales(init(key, x)), tx=tx)

    return jax.jit(make)(jax.random.key(0), x)  # one program; without jit each operation would be one


def spread(mesh: jax.sharding.Mesh | None, **options) -> dict[str, Any]:
    """Options of `make_train_step`, with those about the mesh in a `Parallelism`."""
    fields = {field.name for field in dataclasses.fields(fp8.Parallelism)} & options.keys()
    about_mesh = {name: options.pop(name) for name in fields}
    return options if mesh is None else options | {"parallel": fp8.Parallelism(mesh, **about_mesh)}


def train(
    loss_fn, state, batch, recipe, *, axes=None, tx=SHOWING, steps=1, microbatches=1, warm_start=False, **options
):
    """States and losses; on a mesh with these axes and options, or on one device."""
    options = spread(None if axes is None else make_mesh(**axes), **options)
    step = fp8.make_train_step(loss_fn, tx, recipe, microbatches, warm_start=warm_start, **options)
    return run(step, step.place(jax.tree.map(jnp.copy, state), batch), batch, steps)


def significant(gradients) -> dict:
    """The gradients without those that are only noise: the bias of a key."""
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    return {name: leaf for path, leaf in leaves if "['key']['bias']" not in (name := jax.tree_util.keystr(path))}


def errors(actual, expected) -> dict[str, float]:
    """The relative error of every leaf of a tree that is not zero in the expected one."""
    found = {}
    for (path, got), wanted in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        found[jax.tree_util.keystr(path)] = relative_error(got, wanted)
    return found


def assert_close(actual, expected, tolerance) -> None:
    far = {path: error for path, error in errors(actual, expected).items() if not error <= tolerance}
    assert not far, far
