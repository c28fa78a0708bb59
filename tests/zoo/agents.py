"""A parallel env of PettingZoo, small, whose slots go their own ways without seeds."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

GOOD, BAD = ["good_0", "good_1", "good_2"], ["bad_0", "bad_1"]


class Walk(ParallelEnv):
    """Two groups walk; each agent's first observation is that of its slot and episode.

    Args:
        slot: seeds the env, unless ``reset`` does.
        dies: agents die one after the other; else all end together, at a random step.
        masks: where the legal actions are: in the observation (``"seen"``), or in the infos
            (``"told"``); an illegal one raises.
        tells: infos have numbers.
        continuous: actions are a Box.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "walk_v0", "render_modes": []}

    def __init__(
        self,
        slot: int = 0,
        dies: bool = False,
        masks: str = "",
        tells: bool = False,
        continuous: bool = False,
    ):
        self.possible_agents = [*GOOD, *BAD]
        self.agents: list[str] = []
        self.dies, self.masks, self.tells, self.continuous = dies, masks, tells, continuous
        self.rng = np.random.default_rng(slot)
        self.state_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation_space(self, agent: str) -> Any:
        place = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        if self.masks != "seen":
            return place
        return spaces.Dict({"place": place, "action_mask": spaces.MultiBinary(4)})

    def action_space(self, agent: str) -> Any:
        return spaces.Box(-1, 1, (2,), np.float32) if self.continuous else spaces.Discrete(4)

    def state(self) -> Any:
        return np.array([self.steps, len(self.agents)], np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.steps, self.length = 0, int(self.rng.integers(4, 9))
        self.places = {agent: self.rng.normal(size=3) for agent in self.agents}
        return self._seen(self.agents), self._told(self.agents)

    def _seen(self, agents: list[str]) -> Any:
        self.legal = {agent: self.rng.random(4) < 0.4 for agent in self.possible_agents}
        for legal in self.legal.values():
            legal[self.steps % 4] = True
        if self.masks != "seen":
            return {agent: self.places[agent] for agent in agents}
        return {
            agent: {"place": self.places[agent], "action_mask": self.legal[agent].astype(np.int8)}
            for agent in agents
        }

    def _told(self, agents: list[str]) -> Any:
        infos: Any = {agent: {} for agent in agents}
        for agent in agents:
            if self.masks == "told":
                infos[agent]["action_mask"] = self.legal[agent]
            if self.tells:
                infos[agent] |= {"steps": self.steps, "near": self.places[agent][:2]}
        return infos

    def step(self, actions: Any) -> Any:
        acting = list(self.agents)
        self.steps += 1
        for agent in acting:
            action = actions[agent]
            if self.masks and not self.legal[agent][action]:
                raise ValueError(f"the action {action} of {agent} is illegal")
            self.places[agent] = self.places[agent] + np.sum(action) + self.rng.normal(size=3)
        over = self.steps >= self.length
        terminated = {
            agent: self.dies and self.steps >= 2 + self.possible_agents.index(agent)
            for agent in acting
        }
        truncated = dict.fromkeys(acting, over)
        self.agents = [a for a in acting if not (terminated[a] or truncated[a])]
        rewards = {agent: float(self.places[agent][0]) for agent in acting}
        return self._seen(acting), rewards, terminated, truncated, self._told(acting)
