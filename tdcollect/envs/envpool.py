"""The ``envpool`` backend: EnvPool's C++ envs, in lock step.

EnvPool declares NEXT_STEP, but a subset of its slots restarts at once with ``reset(env_ids)``, and
the next step is then a real one. It takes seeds at construction only: for other seeds, the pool is
built anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tdcollect._upstream.others import flat_pool
from tdcollect.envs.buffers import SlotBuffers
from tdcollect.envs.process.values import Array
from tdcollect.envs.slots import Backend, Can
from tdcollect.packages import extra_module

_MAX_SEED = 2**31 - 1


def check_task_id(task_id: str) -> Any:
    """The envpool package, which is installed and has an env of this id."""
    envpool = extra_module("envpool", "backend='envpool'")
    if task_id not in envpool.list_all_envs():
        raise ValueError(
            f"expected an id of envpool.list_all_envs(), got {task_id!r}; gymnasium's own ids "
            "run with backend='serial'"
        )
    return envpool


class EnvPoolBackend(Backend):
    """The slots of an EnvPool, made with ``options`` of ``envpool.make_gymnasium``."""

    name = "envpool"
    can = Can(seed_singly=False)

    def __init__(
        self,
        task_id: str,
        num_envs: int,
        seeds: Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
        categorical: bool = False,
    ):
        envpool = check_task_id(task_id)
        options = dict(options or {})
        if options.get("batch_size", num_envs) != num_envs:
            raise ValueError(
                f"expected batch_size={num_envs}, the number of envs, got "
                f"{options['batch_size']}: an asynchronous pool does not step in order"
            )
        if seeds is None:
            # EnvPool's own default is a constant; gymnasium's users expect fresh episodes.
            fresh = np.random.SeedSequence().generate_state(num_envs, np.uint32) >> 1
            seeds = [int(seed) for seed in fresh]
        self.check_seeds(seeds)
        self.num_envs = num_envs
        self._make = lambda seed: envpool.make_gymnasium(
            task_id, num_envs=num_envs, seed=seed, **options
        )
        self._build(list(seeds))
        try:
            if self._pool.config.get("max_num_players", 1) != 1:
                raise ValueError(
                    f"expected a single-agent env, got {task_id} with several players per slot; "
                    "use another id"
                )
            self._set_spaces(self._pool.observation_space, self._pool.action_space, categorical)
        except BaseException:
            self.close()
            raise
        # EnvPool hands over a flat list of arrays, which its step() and reset() nest into
        # observations and infos. We read the list itself: at 64 slots a collector's step, which
        # nearly always holds a step and a reset, takes 0.87 of the time.
        self._at = {name: i for i, name in enumerate(self._flat.names)}
        plain = [name for name in self._at if name.split(":")[0] == "obs"]
        direct = self.observation.direct and len(plain) == 1
        self._observation_at = self._at[plain[0]] if direct else None

    def _build(self, seeds: list[int]) -> None:
        with warnings.catch_warnings():
            # EnvPool states its bounds as float64 and gymnasium remarks on the cast.
            warnings.filterwarnings("ignore", message=".*precision lowered by casting")
            self._pool = self.vector_env = self._make(seeds)
            self._flat = flat_pool(self._pool)
            self._pool.observation_space, self._pool.action_space  # noqa: B018  cached in here
        self._seeds: list[int] | None = seeds

    def check_seeds(self, seeds: Iterable[int]) -> None:
        if not all(0 <= seed <= _MAX_SEED for seed in seeds):
            raise ValueError(f"expected EnvPool seeds in [0, 2**31), got {list(seeds)}")

    def reset(
        self,
        slots: Sequence[int],
        seeds: Sequence[int | None] | None,
        options: dict[str, Any] | None,
        out: SlotBuffers,
    ) -> None:
        if options:
            raise ValueError(f"EnvPool takes no reset options, got {options}; pass env_kwargs")
        if seeds is not None:
            if len(slots) != self.num_envs:
                raise ValueError(
                    f"EnvPool seeds at construction only, so seeds for slots {list(slots)} alone "
                    f"cannot be honoured; reset all {self.num_envs} slots with them (env.reset())"
                )
            if list(seeds) != self._seeds:
                self._pool.close()
                self._build([seed for seed in seeds if seed is not None])
        self._seeds = None  # used up: the next reset goes on from here
        self._flat.reset(np.asarray(slots, dtype=np.int32))
        self._receive(out)

    def step(self, actions: Sequence[Array], slots: Sequence[int] | None, out: SlotBuffers) -> None:
        action = self.action.read(actions)
        ids = None
        if slots is not None:
            ids = np.asarray(slots, dtype=np.int32)
            action = _of_slots(action, ids)
        self._pool.send(action, ids)
        state, rows = self._receive(out)
        truncated = state[self._at["trunc"]]
        out.reward[rows] = state[self._at["reward"]]
        out.terminated[rows] = state[self._at["done"]] & ~truncated
        out.truncated[rows] = truncated

    def _receive(self, out: SlotBuffers) -> tuple[list[Array], Any]:
        """Write the pool's next observations and infos; returns all arrays, and their slots."""
        state: list[Array] = self._flat.receive()
        rows: Any = state[self._at["info:env_id"]]
        if self._observation_at is not None:
            observation = state[self._observation_at]
        else:
            observation = self._flat.nest(state, True, True)[0]
        if len(rows) == self.num_envs and (rows == self._pool.all_env_ids).all():
            self.observation.write(observation, out.observation)
            rows = slice(None)
        else:
            values = self.observation.empty(len(rows))
            self.observation.write(observation, values)
            for array, value in zip(out.observation, values, strict=True):
                array[rows] = value
        for entry, array in zip(self.info, out.info, strict=True):
            name = entry.key if entry.key in self._at else f"info:{entry.key}"
            array[rows] = state[self._at[name]]
        return state, rows

    def sample_info(self) -> Mapping[str, Any]:
        specs = {"elapsed_step": self._pool.spec.state_array_spec["elapsed_step"]}
        for key, spec in self._pool.spec.state_array_spec.items():
            if key.startswith("info:") and "players" not in key:
                specs[key.removeprefix("info:")] = spec
        return {key: np.zeros(spec.shape, spec.dtype) for key, spec in specs.items()}

    def render(self) -> list[Any]:
        return list(self._pool.render(self._pool.all_env_ids))

    def close(self) -> None:
        self._pool.close()


def _of_slots(value: Any, slots: Array) -> Any:
    if isinstance(value, dict):
        return {name: _of_slots(item, slots) for name, item in value.items()}
    return value[slots]
