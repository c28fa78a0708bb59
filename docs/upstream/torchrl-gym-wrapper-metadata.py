"""GymWrapper raises AttributeError for vector envs that declare their mode in metadata only."""

import sys

from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode
from torchrl.envs import GymWrapper


def main() -> int:
    print("expected: an env in mode SAME_STEP is wrapped; one in NEXT_STEP is refused as such")
    missed = 0
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        env = CartPoleVectorEnv(2)
        env.metadata = {**env.metadata, "autoreset_mode": mode}  # where gymnasium documents it
        try:
            GymWrapper(env)
            said = "wrapped"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            missed += isinstance(error, AttributeError)
        print(f"got:      {mode.name}: {said}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
