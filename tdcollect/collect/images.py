"""Images in one pass: ``ToTensorImage`` and the ``GrayScale`` after it, compiled by numba.

Torch's own code passes over an image seven times, in float32, colour by colour: 60 to 130 us for a
screen of Atari, where one pass from bytes to grey takes 6 to 16. The extra ``images`` installs
numba; without it, torch's code runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torchrl.envs import transforms as T

from tdcollect.collect.step_dict import StepDict
from tdcollect.collect.transforms import OwnCode, StepTransform


def gray(image: OwnCode, scale: OwnCode) -> list[StepTransform]:
    """A ``ToTensorImage`` and the ``GrayScale`` after it: in one pass if they can be, else both."""
    transform: T.ToTensorImage = image.transform
    keys = [transform.out_keys, scale.transform.in_keys, scale.transform.out_keys]
    plain = transform.dtype is torch.float32 and not transform.unsqueeze
    if not plain or len(transform.in_keys) != 1 or any(part != keys[0] for part in keys):
        return [image, scale]
    run = compiled()
    if run is None:
        scale.how = "on arrays; the extra 'images' (numba) joins it with ToTensorImage"
        return [image, scale]
    return [GrayImages(image, scale, run)]


class GrayImages(StepTransform):
    """``ToTensorImage`` and ``GrayScale`` of one entry, with the bits of both."""

    how = "on arrays, in one pass, compiled by numba in about half a second"

    def __init__(self, image: OwnCode, scale: OwnCode, run: Callable[..., None]):
        self._both, self._run = (image, scale), run
        self._in_key, self._out_key = image.transform.in_keys[0], image.transform.out_keys[0]
        self._divisor = np.float32(1 if image.transform.from_int is False else 255)
        self.label = f"{image.label}, {scale.label}"
        self.by_row = image.by_row and scale.by_row
        self.own_pace = image.own_pace and scale.own_pace

    def step(self, step: StepDict, following: StepDict) -> None:
        if not self._in_one_pass(following):
            for one in self._both:
                one.step(step, following)

    def reset(self, begun: StepDict, marks: StepDict, before: StepDict) -> None:
        if not self._in_one_pass(begun):
            for one in self._both:
                one.reset(begun, marks, before)

    def _in_one_pass(self, entries: StepDict) -> bool:
        """Return whether there is an image ``[*, H, W, 3]`` of bytes; write it ``[*, 1, H, W]``."""
        image = entries.get(self._in_key)
        if image is None or image.dtype is not torch.uint8 or image.device.type != "cpu":
            return False
        *batch, height, width, colours = image.shape
        if colours != 3 or not image.is_contiguous():
            return False
        gray_image = torch.empty((*batch, 1, height, width), dtype=torch.float32)
        self._run(image.view(-1).numpy(), gray_image.view(-1).numpy(), self._divisor)
        entries[self._out_key] = gray_image
        return True


RED, GREEN, BLUE = map(np.float32, (0.2989, 0.587, 0.114))


def _grays(pixels: Any, grays: Any, divisor: Any) -> None:
    """Write the grey of ``pixels`` ``[n * 3]`` into ``found`` ``[n]``, rounded as by torch."""
    for i in range(grays.size):
        red = np.float32(pixels[3 * i]) / divisor * RED
        green = np.float32(pixels[3 * i + 1]) / divisor * GREEN
        grays[i] = red + green + np.float32(pixels[3 * i + 2]) / divisor * BLUE


@functools.cache
def compiled() -> Callable[..., None] | None:
    """The pass over images ``(pixels, found, divisor)``; None where numba cannot be imported."""
    try:
        from numba import float32, njit, uint8, void
    except ImportError:
        return None
    # No fast math: a product and a sum in one instruction would round once, where torch does twice.
    return njit(void(uint8[::1], float32[::1], float32), error_model="numpy")(_grays)
