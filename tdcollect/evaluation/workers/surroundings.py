"""State that a process has once, and that env and policy may depend on."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NamedTuple

import torch


class Surroundings(NamedTuple):
    """The surroundings of an evaluation: its workers run in the same.

    Attributes:
        directory: the working directory; None if it is gone.
        path: the places of modules.
        dtype: torch's default dtype.
        precision: that of torch's float32 matrix products.
        deterministic: torch uses deterministic algorithms only.
    """

    directory: str | None
    path: tuple[str, ...]
    dtype: torch.dtype
    precision: str
    deterministic: bool

    @classmethod
    def here(cls) -> Surroundings:
        """Return those of this process."""
        try:
            directory = os.getcwd()
        except OSError:
            directory = None
        return cls(
            directory,
            tuple(entry for entry in sys.path if isinstance(entry, str)),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def enter(self) -> None:
        """Make them those of this process, which looks for modules in its own places too."""
        if self.directory is not None:
            with contextlib.suppress(OSError):  # another machine may lack it
                os.chdir(self.directory)
        sys.path[:] = [*self.path, *(entry for entry in sys.path if entry not in self.path)]
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        torch.use_deterministic_algorithms(self.deterministic)
