"""Policies for three classic control tasks: rules by hand, and a linear one to train.

The suite calls each factory with an env of the task. ``train.py`` trains ``linear``.
"""

import torch
from tensordict.nn import TensorDictModule
from torchrl.modules import QValueActor


def balance(position, velocity, angle, spin):
    """CartPole: push towards the side that the pole falls to."""
    return (angle + 0.25 * spin + 0.02 * position + 0.05 * velocity > 0).long()


def swing(cos_1, sin_1, cos_2, sin_2, spin_1, spin_2):
    """Acrobot: pull the second link against the first one's motion."""
    return torch.where(spin_1 < 0, 2, 0)


def rock(position, velocity):
    """MountainCar: push the way the car rolls."""
    return torch.where(velocity >= 0, 2, 0)


RULES = {"CartPole-v1": balance, "Acrobot-v1": swing, "MountainCar-v0": rock}


def heuristic(env):
    """Return the rule for the env's task."""
    rule, actions = RULES[env.name], env.action_spec.shape[-1]

    def act(observation):
        return torch.nn.functional.one_hot(rule(*observation.unbind(-1)), actions)

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action"])


def linear(env):
    """Return a linear policy: the action of the largest output."""
    size = env.observation_spec["observation"].shape[-1]
    layer = torch.nn.Linear(size, env.action_spec.shape[-1])
    return QValueActor(layer, in_keys=["observation"], spec=env.action_spec)
