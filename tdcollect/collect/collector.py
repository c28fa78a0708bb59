"""The collector: TorchRL's, with the same constructor, methods and batches."""

from __future__ import annotations

from typing import Any

from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase, GymWrapper, TransformedEnv

from tdcollect._upstream import CollectorMeta, service_backend


class _Dispatch(CollectorMeta):
    """Send ``backend=`` and ``num_collectors=`` where TorchRL's own constructor sends them.

    TorchRL dispatches for its own class only. Here the workers of every other backend run
    tdcollect's collector.
    """

    def __call__(
        cls,
        *args: Any,
        backend: str | None = None,
        backend_options: dict[str, Any] | None = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        _check_frames_per_batch(kwargs)
        chosen = backend or service_backend()
        if chosen is None:
            chosen = "direct" if num_collectors is None else "process"
        if chosen != "direct":
            if cls is not Collector:
                raise TypeError(
                    f"backend, num_collectors and sync are for Collector itself, not for its "
                    f"subclass {cls.__name__}; pass collector_class={cls.__name__} in the "
                    "backend_options of Collector(..., backend=...)"
                )
            options = {"collector_class": cls, **(backend_options or {})}
            return TorchRLCollector(
                *args,
                backend=backend,
                backend_options=options,
                num_collectors=num_collectors,
                sync=sync,
                **kwargs,
            )
        if num_collectors not in (None, 1) or sync is not None or backend_options:
            raise ValueError(
                "backend='direct' is one collector in this process: expected num_collectors=1 and "
                f"no sync and no backend_options, got num_collectors={num_collectors}, "
                f"sync={sync}, backend_options={backend_options}; choose backend='process'"
            )
        args, kwargs = cls._normalize_direct_env_fn(args, kwargs)
        return super().__call__(*args, **kwargs)


def _check_frames_per_batch(kwargs: dict[str, Any]) -> None:
    frames = kwargs.get("frames_per_batch", 1)
    for count in frames if isinstance(frames, (list, tuple)) else [frames]:
        if not count > 0:
            raise ValueError(f"expected frames_per_batch to be positive, got {frames}")


class Collector(TorchRLCollector, metaclass=_Dispatch):
    """TorchRL's ``Collector``, correct and fast on gymnasium envs.

    Takes the arguments of :class:`torchrl.collectors.Collector`, has its methods, and yields its
    batches: ``[N, T]`` TensorDicts, the last dimension named ``"time"``, with the next step's
    entries under ``"next"``.

    It differs from its parent in one thing that the parent gets wrong: :meth:`set_seed` restarts.

    Examples:
        >>> env = make_env("CartPole-v1", num_envs=8)
        >>> collector = Collector(env, frames_per_batch=1024, total_frames=10_240)
        >>> collector.set_seed(0)
        >>> for batch in collector:
        ...     print(batch.shape)  # [8, 128]
    """

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the envs and restart them.

        The next row collected of slot i is a reset with seed ``seed + i``, for the envs that
        :func:`tdcollect.make_env` makes and for TorchRL's gym wrappers. (TorchRL's own collector
        goes on from the unseeded reset of its construction.) Other envs are seeded as their own
        ``set_seed`` does and then reset. Trajectories in flight are dropped; ids go on.

        Args:
            seed: the seed of slot 0.
            static_seed: return the seed as it is.

        Returns:
            The seed for the next env, as TorchRL computes it.
        """
        next_seed = super().set_seed(seed, static_seed=static_seed)
        # A gym wrapper has drawn its seeded episode inside set_seed already: seed it once more.
        self.reset(**({"seed": seed} if isinstance(_base_env(self.env), GymWrapper) else {}))
        return next_seed


def _base_env(env: EnvBase) -> EnvBase:
    return env.base_env if isinstance(env, TransformedEnv) else env


SyncDataCollector = Collector
"""The collector under the name that TorchRL gave it up to version 0.10."""
