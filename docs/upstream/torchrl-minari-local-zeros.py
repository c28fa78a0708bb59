"""MinariExperienceReplay gives zeros in place of the data of a local data set."""

import os
import sys
import tempfile

import gymnasium
import numpy as np


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MINARI_DATASETS_PATH"] = folder
        import minari
        from minari.data_collector import EpisodeBuffer
        from torchrl.data.datasets import MinariExperienceReplay

        episodes = [
            EpisodeBuffer(
                observations=np.arange(1, 17, dtype=np.float32).reshape(4, 4),
                actions=np.array([1, 0, 1]),
                rewards=np.array([1.0, 2.0, 3.0]),
                terminations=np.array([False, False, True]),
                truncations=np.array([False, False, False]),
            )
            for _ in range(2)
        ]
        minari.create_dataset_from_buffers(
            "local/counted-v0",
            episodes,
            observation_space=gymnasium.spaces.Box(0, 16, (4,), np.float32),
            action_space=gymnasium.spaces.Discrete(2),
        )
        there = [r for e in minari.load_dataset("local/counted-v0") for r in e.rewards.tolist()]
        replay = MinariExperienceReplay(
            "local/counted-v0", batch_size=6, root=f"{folder}/torchrl", load_from_local_minari=True
        )
        rewards = replay[:]["next", "reward"].flatten().tolist()
    print("expected: the rewards of the data set,", there)
    print("got:     ", rewards)
    return int(rewards != there)


if __name__ == "__main__":
    sys.exit(main())
