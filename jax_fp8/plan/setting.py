"""`Setting`: a GPT's training step and its mesh, as numbers for plan/arithmetic.py."""

from dataclasses import dataclass

from jax_fp8.plan.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A GPT's training step, and how a mesh spreads it.

    Args:
      batch, sequence: sequences of all devices together, and tokens of each.
      by_tile: whether the recipe is `BlockScaling`.
      recompute, full: `remat="norms"`, `remat="full"`.
      offloaded: the N of `remat="offload:N"`.
      lora: the rank of adapters, which alone are trained; 0: there are none.
    """

    shape: Shape
    batch: int
    sequence: int
    microbatches: int = 1
    pipe: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    fp8: bool = True
    by_tile: bool = False
    fp8_attention: bool = False
    recompute: bool = False
    full: bool = False
    offloaded: int = 0
    bf16_params: bool = False
    bf16_moments: bool = False
    lora: int = 0

    @property
    def devices(self) -> int:
        return self.pipe * self.data * self.fsdp * self.tensor

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one device."""
        return self.batch * self.sequence / (self.data * self.fsdp * self.microbatches)

    @property
    def layers_of_a_step(self) -> float:
        """Layers that a device computes in a step, counted once for each microbatch."""
        return self.shape.layers * self.microbatches / self.pipe

    @property
    def bubble(self) -> float:
        """The share of time in which a stage waits, if forward, input and weight gradients take equally long."""
        microbatches, others = self.microbatches, self.pipe - 1
        if self.schedule != "zero-bubble":
            return others / (self.chunks * microbatches + others)
        # So many weight gradients fill the bubble: one if there is a second group of microbatches, more from the third.
        hidden = min(others, max(microbatches > self.pipe, microbatches - 2 * self.pipe + 1))
        return (2 * others - hidden) / (3 * microbatches + 2 * others - hidden)

    @property
    def slots(self) -> float:
        """For how many microbatches a stage keeps the residuals of all its layers at the same time."""
        if self.pipe == 1:
            return 1
        if self.schedule == "gpipe":
            return self.microbatches
        # With enough microbatches, the first one is done by then, and its slot is free.
        before = self.schedule != "zero-bubble" and self.microbatches >= 2 * self.pipe
        first = min(self.microbatches - before, 3 * self.pipe - 2)
        return (first + (self.chunks - 1) * self.pipe) / self.chunks

    @property
    def mesh(self) -> str:
        sizes = {"pipe": self.pipe, "data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"

    @property
    def flags(self) -> str:
        """The flags of `python -m jax_fp8 plan` that spread the step like this."""
        of_pipe = [f"--schedule {self.schedule}"] if self.pipe > 1 else []
        of_pipe += [f"--chunks {self.chunks}"] if self.chunks > 1 else []
        microbatches = [f"--microbatches {self.microbatches}"] if self.microbatches > 1 else []
        parallel = ["--sequence-parallel"] if self.sequence_parallel else []
        return " ".join([f"--mesh {self.mesh}", *parallel, *of_pipe, *microbatches])

    def __str__(self) -> str:
        chunks = f" of {self.chunks} chunks" if self.chunks > 1 else ""
        words = [
            self.mesh,
            *(["sequence parallel"] if self.sequence_parallel else []),
            *([f"{self.schedule}{chunks}"] if self.pipe > 1 else []),
            *([f"{self.microbatches} microbatches"] if self.microbatches > 1 else []),
        ]
        return ", ".join(words)
