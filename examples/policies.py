"""Policies for the command line, chosen by name.

    tdcollect evaluate CartPole-v1 --policy examples/policies.py:lean --output-dir runs/lean

A factory returns a policy. If it has a parameter, it is called with the env, whose specs determine
the sizes of the network (see ``actor`` in ppo.py). ``--checkpoint`` then loads a ``state_dict``.
"""

import torch
from tensordict.nn import TensorDictModule


def lean():
    """A policy that pushes CartPole's cart to the side its pole leans to."""

    def push(observation):
        return torch.nn.functional.one_hot((observation[..., 2] > 0).long(), 2)

    return TensorDictModule(push, in_keys=["observation"], out_keys=["action"])


def catch():
    """A policy that pushes CartPole's cart to the side its pole falls to."""

    def push(observation):
        return torch.nn.functional.one_hot((observation[..., 3] > 0).long(), 2)

    return TensorDictModule(push, in_keys=["observation"], out_keys=["action"])
