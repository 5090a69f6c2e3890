"""benchmarks/decoding_layers.cu compiles beside the kernels that it times, and says what arguments it takes."""

import shutil
import subprocess
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_it_compiles_and_refuses_other_arguments(tmp_path):
    program = tmp_path / "decoding_layers"
    options = ["-std=c++20", "-arch=sm_90a", "-O1", "-Xptxas", "-O0", f"-I{ROOT}/csrc", f"-I{jax.ffi.include_dir()}"]
    subprocess.run(["nvcc", *options, ROOT / "benchmarks/decoding_layers.cu", "-o", program], check=True, timeout=600)
    for arguments, sentence in {
        ("--rows", "65"): "--rows must be from 1 to 64, got 65",
        ("--what",): "the arguments are --rows N, --model NAME, --cache fp8, --prompt N, --step N and --search, got",
        ("--step", "256"): "--prompt must be at least 1 and --step from 0 to 255, got 512 and 256",
    }.items():
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and sentence in done.stderr
