"""A stand-in for the part of torchvision that TorchRL's ``Resize`` calls.

It serves where torchvision is not installed, or was built for another torch. The resampling is
torch's own, as in torchvision.
"""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType

import torch
import torchrl.data.datasets  # it and the next look for torchvision, and must not find the stand-in
import torchrl.record  # noqa: F401
from torch.nn import functional
from torchrl.envs.transforms import _observation


class InterpolationMode(Enum):
    """The names of the modes that torch has."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


def resize(
    image: torch.Tensor,
    size: list[int],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    antialias: bool = True,
) -> torch.Tensor:
    """Images ``[*, H, W]`` at another size."""
    whole = image.reshape(-1, *image.shape[-3:])
    smaller = functional.interpolate(
        whole, size=size, mode=interpolation.value, align_corners=False, antialias=antialias
    )
    return smaller.reshape(*image.shape[:-2], *size)


def provide() -> bool:
    """Make ``Resize`` usable; return True if the stand-in is in use."""
    try:
        import torchvision.transforms.functional as real
    except (ImportError, RuntimeError):
        _stand_in()
        return True
    return not hasattr(real, "__file__")


def _stand_in() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    modules = [ModuleType(name) for name in names]
    sys.modules.update(zip(names, modules, strict=True))
    modules[0].transforms, modules[1].functional = modules[1], modules[2]
    modules[2].InterpolationMode, modules[2].resize = InterpolationMode, resize
    _observation._has_tv = True
