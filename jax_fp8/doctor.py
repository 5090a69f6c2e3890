"""`python -m jax_fp8 doctor`: what this machine has, what is missing, and what to do about it.

The findings are measured: the last one computes the gradient of an FP8 layer on the device that a training run would
use, and compares it with the gradient in bfloat16.
"""

import importlib.metadata
import platform
import shutil
import subprocess
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_fp8 import __version__
from jax_fp8.core.recipe import CurrentScaling
from jax_fp8.core.types import Variables
from jax_fp8.kernels import dispatch, extension
from jax_fp8.nn.dense import Dense
from jax_fp8.train.custom_loop import value_and_grad

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


class Finding(NamedTuple):
    """One line of the diagnosis; `remedy` says what to do, and `broken` means that FP8 training does not work so."""

    what: str
    found: str
    remedy: str = ""
    broken: bool = False


def doctor() -> int:
    """Print the diagnosis. Returns the exit code: 0 when FP8 training works here, 1 when something is broken."""
    findings = [*find_versions(), *find_devices()]
    if findings[-1].what != "devices":  # jax computes at all
        findings += find_kernels()
        if not (extension.is_broken() and jax.default_backend() == "gpu"):  # nothing can be computed then
            findings.append(find_training())
    for finding in findings:
        mark = "BROKEN" if finding.broken else "note" if finding.remedy else "ok"
        print(f"{mark:>6}  {finding.what:<10} {finding.found}")
        if finding.remedy:
            print(f"{'':>8}{'':<11}-> {finding.remedy}")
    broken = [finding.what for finding in findings if finding.broken]
    if broken:
        print(f"\nBroken: {', '.join(broken)}. The arrows say what to do.")
        return 1
    if dispatch.kernels_run() and jax.default_backend() == "gpu":
        print("\nFP8 training works here, with the CUDA kernels.")
    else:
        print("\nFP8 training works here, on the jnp reference: a Hopper GPU's numbers without its speed.")
    return 0


def find_versions() -> list[Finding]:
    """The versions of this package, with its folder, of Python, and of the packages that compute."""
    own = Finding("jax_fp8", f"{__version__}, from {extension.PACKAGE}")
    packages = [Finding(package, importlib.metadata.version(package)) for package in PACKAGES]
    return [own, Finding("python", platform.python_version()), *packages]


def find_devices() -> list[Finding]:
    """The devices jax computes on, their compute capability, and NVIDIA GPUs that jax does not see."""
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax asserts where the plugin of its only platform fails
        remedy = "unset JAX_PLATFORMS, or install jax for the platform it names"
        found = "none: " + (" ".join(str(error).split()) or "no platform could be initialised")
        return [Finding("devices", found, remedy, broken=True)]
    kinds = [Finding("devices", f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})")]
    if devices[0].platform == "gpu":
        capability = devices[0].compute_capability
        remedy = ""
        if float(capability) < 8.9:
            remedy = "FP8 tensor cores begin with 8.9 (Ada) and 9.0 (Hopper): use recipe=None (bfloat16) on this GPU"
        return [*kinds, Finding("capability", capability, remedy)]
    gpus = list_nvidia_gpus()
    if gpus:
        remedy = "`pip install 'jax[cuda13]'` (it needs driver 580 or newer), and unset JAX_PLATFORMS if it is set"
        return [*kinds, Finding("GPU", f"{gpus[0]}, which jax does not see", remedy, broken=True)]
    return [*kinds, Finding("GPU", "none")]


def list_nvidia_gpus() -> list[str]:
    """Names of the GPUs the NVIDIA driver reports; empty without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return [line for line in listed.stdout.splitlines() if line.startswith("GPU")]


def find_kernels() -> list[Finding]:
    """Whether the CUDA kernels are compiled and registered, and whether cuBLASLt is there; only a GPU needs them."""
    info = extension.build_info()
    needed = jax.default_backend() == "gpu"
    module = [Finding("extension", info["path"])] if info["path"] else []
    if not info["built"]:
        return [*module, Finding("kernels", "none", info["reason"] or "", broken=needed)]
    calls = f"{len(info['targets'])} custom calls registered, CUDA {info['cuda_version']}"
    architectures = ", ".join(f"sm_{architecture}" for architecture in info["architectures"])
    registered = Finding("kernels", f"{calls}, compiled for {architectures}")
    if info["cublaslt_version"]:
        return [*module, registered, Finding("cuBLASLt", info["cublaslt_version"])]
    remedy = (info["cublaslt_reason"] or "") if needed else "needed on a GPU only"
    return [*module, registered, Finding("cuBLASLt", "not found", remedy, broken=needed)]


def find_training() -> Finding:
    """Compare the gradient of an FP8 layer with that of the same layer in bfloat16."""
    x, target = jax.random.normal(jax.random.key(0), (2, 64, 64), jnp.bfloat16)
    gradients = []
    for recipe in (CurrentScaling(), None):
        layer = Dense(64, recipe=recipe)

        def loss_fn(variables: Variables, x: jax.Array, layer: Dense = layer) -> jax.Array:
            return jnp.mean(jnp.square(layer.apply(variables, x) - target).astype(jnp.float32))

        variables = layer.init(jax.random.key(1), x)
        _, grads, _ = jax.jit(value_and_grad(loss_fn))(variables, x)
        gradients.append(grads["kernel"].astype(jnp.float32))
    error = float(jnp.linalg.norm(gradients[0] - gradients[1]) / jnp.linalg.norm(gradients[1]))
    found = f"gradient of an FP8 layer differs from bfloat16's by {100 * error:.1f} %"
    if error < 0.1:
        return Finding("training", found)
    return Finding("training", found, "expected less than 10 %: please report this with the lines above", broken=True)
