"""What a function will do, read before it runs: `explain` reads its jaxpr, `capture_report` what XLA compiled."""
