"""Haliax and qwix over a mesh of four devices, and from saved files: `make hosts` runs this on a CPU, in two minutes.

    python tests/hosts/meshes_check.py --output meshes_check.json

The models and steps of haliax_check.py and qwix_check.py, with batches that are split over four devices, must have the
losses of one device. What their libraries save must hold the states: a model that was restored has the same loss, bit
for bit. Ends with one line per group of checks, and with exit code 1 if a check failed.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import equinox as eqx
import flax
import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import haliax_check
import qwix_check
from gpu.report import Report, Script, run_script

import jax_fp8 as fp8
from jax_fp8.integrations.qwix import Fp8Provider

RECIPES = {"delayed": fp8.DelayedScaling(amax_history_len=8), "current": fp8.CurrentScaling()}
STEPS = 6
CLOSE = 5e-3  # of a loss, relative


def split(batch):
    """A batch over all devices."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))


def off(losses, expected) -> float:
    return max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))


def check_haliax(report: Report):
    whole = haliax_check.batches(STEPS)
    parts = [split(tokens) for tokens in whole]
    report.expect("split", all(len(tokens.sharding.device_set) == 4 for tokens in parts), "batches")
    for name, recipe in RECIPES.items():
        expected, _ = haliax_check.train(haliax_check.make(recipe), data=whole)
        losses, model = haliax_check.train(haliax_check.make(recipe), data=parts)
        report.worst[f"of a loss over a mesh, haliax, {name}, relative"] = off(losses, expected)
        report.expect("mesh", off(losses, expected) < CLOSE, f"haliax, {name}: {losses} instead of {expected}")
        states = haliax_check.states_of(model)
        filled = all(bool((state.amax_history[..., -STEPS:] > 0).all()) for state in states)
        report.expect("states", filled and bool(states) == recipe.has_state, f"haliax, {name}: {len(states)}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.eqx"
            eqx.tree_serialise_leaves(path, model)
            restored = eqx.tree_deserialise_leaves(path, haliax_check.make(recipe))
        found, wanted = (jax.tree.leaves(eqx.filter(each, eqx.is_array)) for each in (restored, model))
        same = all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
        report.expect("restored", same, f"haliax, {name}")
        fresh = jax.tree.leaves(eqx.filter(haliax_check.make(recipe), eqx.is_array))
        report.expect("controls", not all(map(np.array_equal, fresh, wanted)), f"haliax, {name}: a new model")


def check_qwix(report: Report):
    own = qwix_check.batches
    for kind, train in qwix_check.TRAIN.items():
        for name, recipe in RECIPES.items():
            expected, _ = train(Fp8Provider({".*": recipe}), STEPS)
            try:
                qwix_check.batches = lambda steps: [jax.tree.map(split, batch) for batch in own(steps)]
                losses, variables = train(Fp8Provider({".*": recipe}), STEPS)
            finally:
                qwix_check.batches = own
            report.worst[f"of a loss over a mesh, qwix in {kind}, {name}, relative"] = off(losses, expected)
            report.expect("mesh", off(losses, expected) < CLOSE, f"qwix, {kind}, {name}: {losses} not {expected}")
            if not recipe.has_state:
                continue
            histories = qwix_check.histories(variables)
            filled = all(bool((history[:, -STEPS:] > 0).all()) for history in histories)
            report.expect("states", filled and len(histories) > 2, f"qwix, {kind}: {len(histories)}")
            if kind == "Linen":
                saved = flax.serialization.to_bytes(variables)
                restored = flax.serialization.from_bytes(jax.tree.map(np.zeros_like, variables), saved)
                same = jax.tree.map(np.array_equal, restored, variables)
                report.expect("restored", all(jax.tree.leaves(same)), "qwix, Linen")


CHECKS = [check_haliax, check_qwix]


def main(arguments: list[str] | None = None) -> int:
    return run_script(Script(__file__, __doc__, CHECKS, anywhere=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
