"""VecNormV2's scale holds part of the mean, until 1 / (1 - decay) observations have come."""

import sys

import torch
from tensordict import TensorDict
from torchrl.envs.transforms import VecNorm, VecNormV2


def main() -> int:
    torch.manual_seed(0)
    data = 10 + torch.randn(1000, 1)
    norms = {
        "VecNormV2": VecNormV2(in_keys=["observation"]),
        "VecNormV2(decay=1.0)": VecNormV2(in_keys=["observation"], decay=1.0),
        "VecNorm": VecNorm(in_keys=["observation"]),
    }
    print("1,000 numbers of mean 10 and standard deviation 1; 12 normalized: expected about 2")
    results = {}
    for name, norm in norms.items():
        for row in data:
            norm._step(TensorDict(), TensorDict({"observation": row}))
        norm.eval()
        if isinstance(norm, VecNormV2):
            norm = norm.freeze()
        out = norm._step(TensorDict(), TensorDict({"observation": torch.tensor([12.0])}))
        results[name] = out["observation"].item()
        print(f"{name + ':':22}{results[name]:.2f}")
    return int(abs(results["VecNormV2"] - 2) > 0.2)


if __name__ == "__main__":
    sys.exit(main())
