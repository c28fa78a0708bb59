"""Policies by name, for the command line.

    tdcollect evaluate CartPole-v1 --policy examples/policies.py:lean --out runs/lean

A factory gives a policy. One that has a parameter is called with the env, whose specs tell the
sizes of its network; ``--checkpoint`` then loads a ``state_dict`` into the policy.
"""

import torch
from tensordict.nn import TensorDictModule
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor


def lean():
    """Pushes CartPole's cart to the side that its pole leans to, which goes well for a while."""

    def push(observation):
        return torch.nn.functional.one_hot((observation[..., 2] > 0).long(), 2)

    return TensorDictModule(push, in_keys=["observation"], out_keys=["action"])


def actor(env):
    """The actor that examples/ppo.py trains; ``runs/demo/policy.pt`` holds its weights."""
    observations = env.observation_spec["observation"].shape[-1]
    actions = env.action_spec.shape[-1]
    return ProbabilisticActor(
        TensorDictModule(
            MLP(observations, actions, num_cells=[64, 64]), ["observation"], ["logits"]
        ),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
