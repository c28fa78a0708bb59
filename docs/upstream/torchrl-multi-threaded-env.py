"""MultiThreadedEnv (EnvPool) cannot be made from gymnasium."""

import importlib.util
import sys

from torchrl.envs import MultiThreadedEnv


def main() -> int:
    for name in ("gymnasium", "gym", "envpool"):
        print(f"{name} is installed:", importlib.util.find_spec(name) is not None)
    print("expected: an env with two slots")
    try:
        print("got:     ", MultiThreadedEnv(2, env_name="CartPole-v1").batch_size)
    except (ImportError, KeyError) as error:  # with gym, spaces of gymnasium are unknown to it
        print("got:     ", type(error).__name__, str(error).splitlines()[0])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
