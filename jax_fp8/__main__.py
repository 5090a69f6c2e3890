"""`python -m jax_fp8`: see `jax_fp8.cli`."""

import sys

from jax_fp8.cli import main

sys.exit(main(sys.argv[1:]))
