"""EnvPool's gymnasium pools are VectorEnvs whose observation_space is that of one env."""

import sys
import warnings

import envpool
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

warnings.filterwarnings("ignore", message=".*precision lowered by casting")


def main() -> int:
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=3)
    observation, _ = pool.reset()
    contained = pool.observation_space.contains(observation)
    batched = batch_space(pool.single_action_space, 3)
    print("a VectorEnv:", isinstance(pool, VectorEnv))
    print("expected: observation_space of shape (3, 4), which holds what reset() returns")
    print(f"got:      shape {pool.observation_space.shape}; holds it: {contained}")
    print(f"expected: action_space {batched}")
    print(f"got:      action_space {pool.action_space}")
    return int(not contained or pool.action_space != batched)


if __name__ == "__main__":
    sys.exit(main())
