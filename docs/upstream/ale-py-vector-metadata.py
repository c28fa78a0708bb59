"""AtariVectorEnv writes its autoreset mode into the dict that all vector envs share."""

import sys

from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode, VectorEnv


def main() -> int:
    first = AtariVectorEnv("pong", 1, autoreset_mode=AutoresetMode.SAME_STEP)
    AtariVectorEnv("pong", 1, autoreset_mode=AutoresetMode.NEXT_STEP)
    mode = first.metadata["autoreset_mode"].name
    shared = VectorEnv.metadata.get("autoreset_mode")
    VectorEnv.metadata.clear()  # for whatever runs after this
    print("expected: SAME_STEP in the first env's metadata; none in gymnasium's VectorEnv")
    print(f"got:      {mode} in the first env's metadata; {shared and shared.name} in VectorEnv")
    return int(mode != "SAME_STEP" or shared is not None)


if __name__ == "__main__":
    sys.exit(main())
