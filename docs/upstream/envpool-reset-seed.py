"""reset(seed=) of EnvPool's gymnasium envs does not seed."""

import sys
import warnings

import envpool
import numpy as np

warnings.filterwarnings("ignore", message=".*precision lowered by casting")


def main() -> int:
    pool = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=5)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            first, second = (pool.reset(seed=7)[0] for _ in range(2))
        except ValueError as error:
            print("refused:  ", error)  # as well as honoured
            return 0
    print("expected: reset(seed=7) twice gives one observation, as gymnasium's API has it")
    print("got:     ", first[0].round(4))
    print("         ", second[0].round(4))
    print("warned:  ", *{text for w in said if "seed" in (text := str(w.message))})
    return int(not np.array_equal(first, second))


if __name__ == "__main__":
    sys.exit(main())
