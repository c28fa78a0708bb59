"""A policy by name, for the command line.

    tdcollect evaluate CartPole-v1 --policy examples/policies.py:lean --output-dir runs/lean

A factory gives a policy. One that has a parameter is called with the env, whose specs tell the
sizes of its network, as ``actor`` in ppo.py; ``--checkpoint`` then loads a ``state_dict`` into it.
"""

import torch
from tensordict.nn import TensorDictModule


def lean():
    """Pushes CartPole's cart to the side that its pole leans to, which goes well for a while."""

    def push(observation):
        return torch.nn.functional.one_hot((observation[..., 2] > 0).long(), 2)

    return TensorDictModule(push, in_keys=["observation"], out_keys=["action"])
