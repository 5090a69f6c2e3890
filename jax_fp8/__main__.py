"""`python -m jax_fp8`: see `jax_fp8.cli`."""

import sys

from jax_fp8.cli import main
from jax_fp8.run.leaving import leave

leave(main(sys.argv[1:]))
