"""What a function will do before it runs: `explain` reads its jaxpr, `capture_report` the program that XLA compiled."""
