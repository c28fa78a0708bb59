"""Train MAPPO on VMAS's balance: three agents carry a package to its goal, on a beam.

    pip install vmas
    python examples/multi_agent.py --frames 60000

Then compares the agents with random actions, on the same numbered test episodes. The collector and
the evaluation take TorchRL's env as it is, its nested entries included.
"""

import argparse
from functools import partial

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.envs import RewardSum, TransformedEnv, VmasEnv
from torchrl.modules import MultiAgentMLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss

import tdcollect

AGENTS, MAX_STEPS, NUM_ENVS, EPOCHS, MINIBATCH = 3, 100, 60, 15, 1000
OBSERVATION, ACTION = ("agents", "observation"), ("agents", "action")
REWARD, EPISODE_REWARD = ("agents", "reward"), ("agents", "episode_reward")
LOC, SCALE = ("agents", "loc"), ("agents", "scale")


def make_env(num_envs, seed=None):
    env = VmasEnv("balance", num_envs=num_envs, max_steps=MAX_STEPS, n_agents=AGENTS, seed=seed)
    return TransformedEnv(env, RewardSum(in_keys=[REWARD], out_keys=[EPISODE_REWARD]))


def network(env, outputs, centralised):
    """A network that the agents share; a centralised one sees all of their observations."""
    return MultiAgentMLP(
        n_agent_inputs=env.observation_spec[OBSERVATION].shape[-1],
        n_agent_outputs=outputs,
        n_agents=AGENTS,
        centralised=centralised,
        share_params=True,
        depth=2,
        num_cells=128,
        activation_class=nn.Tanh,
    )


def actor_for(env):
    spec = env.full_action_spec_unbatched
    net = nn.Sequential(network(env, 2 * spec[ACTION].shape[-1], False), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, [OBSERVATION], [LOC, SCALE]),
        in_keys=[LOC, SCALE],
        out_keys=[ACTION],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": spec[ACTION].space.low, "high": spec[ACTION].space.high},
        return_log_prob=True,
    )


def train(seed, frames):
    """Return the trained actor."""
    torch.manual_seed(seed)
    env = make_env(NUM_ENVS, seed)
    actor = actor_for(env)
    critic = ValueOperator(network(env, 1, True), [OBSERVATION], [("agents", "state_value")])
    loss_module = ClipPPOLoss(actor, critic, entropy_coeff=0.0)
    loss_module.set_keys(
        reward=REWARD,
        action=ACTION,
        sample_log_prob=("agents", "action_log_prob"),
        value=("agents", "state_value"),
        done=("agents", "done"),
        terminated=("agents", "terminated"),
    )
    loss_module.make_value_estimator(gamma=0.99, lmbda=0.9)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=5e-4)
    collector = tdcollect.Collector(
        env, actor, frames_per_batch=NUM_ENVS * MAX_STEPS, total_frames=frames
    )
    collector.set_seed(seed)
    for batch in collector:  # [N, T]
        for name in ("done", "terminated"):  # one flag per env; the loss needs one per agent
            flag = batch["next", name].unsqueeze(-1).expand(batch["next", REWARD].shape)
            batch["next", "agents", name] = flag
        with torch.no_grad():
            loss_module.value_estimator(batch)
        rows = batch.reshape(-1)
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(rows)).split(MINIBATCH):
                losses = loss_module(rows[chosen])
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
                optimizer.step()
        ended = batch["next", EPISODE_REWARD][batch["next", "done"].squeeze(-1)]
        print(f"{len(ended)} episodes ended, mean return {ended.mean():.1f}")
    return actor


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=600_000, help="frames to train for")
    parser.add_argument("--episodes", type=int, default=50, help="number of test episodes")
    parser.add_argument("--seed", type=int, default=0, help="training seed")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)

    actor = train(args.seed, args.frames)
    # A function that makes one env: each test episode is seeded by itself, and VMAS has one seed
    # for all envs of a batch.
    one = partial(make_env, 1)
    trained, by_chance = (tdcollect.evaluate(one, p, args.episodes) for p in (actor, None))
    print(trained.summary())
    print(tdcollect.compare(by_chance, trained, names=["random", "MAPPO"]))


if __name__ == "__main__":
    main()
