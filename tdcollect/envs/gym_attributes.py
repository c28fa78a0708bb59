"""Attributes of the gymnasium envs inside, and readers of infos, as ``GymEnv`` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, default_info_dict_reader
from torchrl.envs.gym_like import BaseInfoDictReader

from tdcollect.envs.stepper import Stepper
from tdcollect.workers.launch import WorkerLost


class GymAttributes(EnvBase):
    """The part of an env of gymnasium slots that is called as ``GymEnv`` is.

    A name that the env does not know itself is looked up on the gymnasium env of the slot, as
    ``env.unwrapped``, ``env.spec``, ``env.metadata``, ``env.render_mode`` or
    ``env.get_wrapper_attr("lives")``. With several slots, it gives a list with one value per slot;
    with a vector env, the vector env's own. Values come from worker processes as copies.
    """

    stepper: Stepper

    def __getattr__(self, name: str) -> Any:
        stepper = vars(self).get("stepper")
        if name.startswith("_") or stepper is None or stepper.is_closed:
            return super().__getattr__(name)
        vector = stepper.backend.vector_env
        if vector is not None:
            return getattr(vector, name)
        try:
            values = stepper.backend.attributes(name)
        except (AttributeError, NotImplementedError, WorkerLost) as error:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, and the envs of its "
                f"slots give none: {error}"
            ) from error
        if not self.batch_size:
            return values[0]
        if all(callable(value) for value in values):
            return lambda *args, **kwargs: [value(*args, **kwargs) for value in values]
        return values

    @property
    def info_dict_reader(self) -> list[BaseInfoDictReader]:
        """The readers that :meth:`set_info_dict_reader` was given."""
        return list(vars(self).get("info_readers", ()))

    def set_info_dict_reader(
        self,
        info_dict_reader: BaseInfoDictReader | None = None,
        ignore_private: bool = True,
    ) -> GymAttributes:
        """Store infos with the observations, as ``info_keys`` of ``make_env`` does.

        The slots must be reset before they are stepped on. Shapes and dtypes are read off a reset
        and a step of one slot; an info that the env leaves out reads zero.

        Args:
            info_dict_reader: TorchRL's ``default_info_dict_reader``, with its keys and specs; None
                for all infos that are numbers or arrays of numbers.
            ignore_private: leave out infos whose name begins with an underscore.

        Returns:
            This env.

        Raises:
            TypeError: for a reader of another class.
            KeyError: if the env gives no info of a name.
        """
        reader = info_dict_reader
        if reader is None:
            reader = default_info_dict_reader(ignore_private=ignore_private)
        if not isinstance(reader, default_info_dict_reader):
            raise TypeError(
                f"expected TorchRL's default_info_dict_reader, or None, got {reader!r}; use GymEnv "
                "for a reader of your own"
            )
        examples = dict(self.stepper.backend.sample_info())
        if reader.keys is None:
            reader.keys = [
                name
                for name, value in examples.items()
                if _is_number(value) and not (reader.ignore_private and name.startswith("_"))
            ]
        missing = [name for name in reader.keys if name not in examples]
        spec = Composite() if reader.info_spec is None else reader.info_spec
        for name in reader.keys:
            if name in spec and (name in missing or spec[name] != Unbounded(())):
                examples[name] = spec[name].zero().numpy()
        if unknown := [name for name in reader.keys if name not in examples]:
            raise KeyError(
                f"the infos {unknown} are in neither the first reset nor the first step, which "
                f"hold {sorted(examples)}; give the reader a spec of each"
            )
        self.read_infos({name: examples[name] for name in reader.keys})
        self.__dict__.setdefault("info_readers", []).append(reader)
        return self

    def read_infos(self, examples: Mapping[str, Any]) -> None:
        """Store further infos with the observations; the slots must be reset.

        Args:
            examples: by name, with the shapes and dtypes to expect.
        """
        raise NotImplementedError

    def auto_register_info_dict(
        self, ignore_private: bool = True, *, info_dict_reader: BaseInfoDictReader | None = None
    ) -> GymAttributes:
        """Store infos with the observations; see :meth:`set_info_dict_reader`.

        Raises:
            RuntimeError: if the env has a reader of infos already.
        """
        if self.info_dict_reader:
            raise RuntimeError("The environment already has an info-dict reader.")
        return self.set_info_dict_reader(info_dict_reader, ignore_private)


def _is_number(value: Any) -> bool:
    array = np.asarray(value)
    return array.dtype.kind in "biuf" and array.dtype.itemsize <= 8
