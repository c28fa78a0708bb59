"""Evaluation with a policy on a GPU: which bits repeat, what differs from the CPU, and the time.

Ledgers are compared over numbers of slots and over two runs, with torch's default algorithms and
with its deterministic ones; episodes are compared with those of the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from gpu_setting import Plan, Row, Setting
from reproducibility import policy
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import ExplorationType
from torchrl.modules import GRUModule, LSTMModule, OneHotCategorical, ProbabilisticActor

import tdcollect

CARTPOLE, CHEETAH = "CartPole-v1", "HalfCheetah-v5"
SLOTS = (1, 7, 64)
SLOWER = 1.3
"""The aim for the time of episodes on the GPU over that on the CPU."""

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
LIKELY = {"exploration_type": ExplorationType.DETERMINISTIC}
DRAWN = {"exploration_type": ExplorationType.RANDOM}


def evaluation(setting: Setting) -> Plan:
    """Yield the measurements of evaluation."""
    device, quick = torch.device(setting.device), setting.quick
    yield "100 episodes", partial(long_episodes, device, quick)
    yield "ledgers", partial(ledgers, device, quick, strict=False)
    yield "beside the CPU", partial(beside_cpu, device, quick)
    yield "times", partial(times, device, quick)
    if not quick:
        yield "ledgers, deterministic", partial(ledgers, device, quick, strict=True)


def long_episodes(device: torch.device, quick: bool) -> Row:
    """The time of 100 episodes of 500 steps on 16 slots, beside that of the CPU, in turns."""
    episodes, most = (4, 5) if quick else (100, 500)
    runs = [_evaluation(CARTPOLE, balancing(64).to(where), episodes, most, DRAWN)
            for where in ("cpu", device)]  # fmt: skip
    for run in runs:
        run(num_envs=16, max_episode_steps=5)  # warms up
    took: list[list[float]] = [[], []]
    for _ in range(2):
        for run, times_of in zip(runs, took, strict=True):
            start = time.perf_counter()
            run(num_envs=16)
            times_of.append(time.perf_counter() - start)
    cpu, there = map(min, took)
    row = [episodes, most, f"{cpu:.3g}", f"{there:.3g}", f"{there / cpu:.2f}"]
    head = [f"{CARTPOLE}, 64 x 64, drawn: episodes", "steps at most", "CPU, s", "device, s",
            f"device / CPU; aim {SLOWER:g}"]  # fmt: skip
    text = ", ".join(f"{name} {value}" for name, value in settings(device).items())
    return {"device_over_cpu": there / cpu, "table": f"Settings: {text}.\n\n{_table(head, [row])}"}


def settings(device: torch.device) -> dict[str, Any]:
    """The settings of torch that decide how a GPU rounds, as they are."""
    cudnn, named = torch.backends.cudnn, device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if named else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version(),
        "cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": cudnn.allow_tf32,
        "cudnn.deterministic": cudnn.deterministic,
        "cudnn.benchmark": cudnn.benchmark,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        WORKSPACE: os.environ.get(WORKSPACE),
    }


def ledgers(device: torch.device, quick: bool, strict: bool) -> Row:
    """Compare the ledgers of the same episodes over numbers of slots, and of two runs.

    Args:
        device: of the policy.
        quick: see :func:`measure`.
        strict: use deterministic algorithms only.
    """
    episodes, most = (7, 5) if quick else (64, 30)
    counts = SLOTS[:2] if quick else SLOTS
    rows = []
    with algorithms(strict):
        for name, (make, exploration) in _policies().items():
            row: dict[str, Any] = {"policy": name, "deterministic_algorithms": strict}
            rows.append(row)
            try:
                run = _evaluation(CARTPOLE, make().to(device), episodes, most, exploration)
                found = [run(num_envs=count).digest for count in counts]
                again = run(num_envs=counts[-1]).digest
            except RuntimeError as error:  # an operation that has no deterministic algorithm
                row["error"] = str(error).splitlines()[0]
                continue
            row.update(slots=list(counts), ledgers=len(set(found)), repeats=again == found[-1])
    head = ["policy", "algorithms", "slots", "different ledgers", "a second run"]
    body = [
        [row["policy"], "deterministic" if strict else "default",
         ", ".join(map(str, row.get("slots", []))), row.get("ledgers", row.get("error")),
         {True: "the same", False: "differs", None: ""}[row.get("repeats")]]
        for row in rows
    ]  # fmt: skip
    return {"ledgers": rows, "table": _table(head, body)}


def beside_cpu(device: torch.device, quick: bool) -> Row:
    """Compare episodes with those of the same policy on the CPU."""
    episodes, most = (3, 5) if quick else (20, 200)
    rows = []
    for env in _envs():
        for kind, exploration in (("most likely", LIKELY), ("drawn", DRAWN)):
            run = [
                _evaluation(env, policy(env).to(where), episodes, most, exploration)()
                for where in ("cpu", device)
            ]
            pairs = list(zip(run[0].episodes, run[1].episodes, strict=True))
            change = [abs((a.episode_return or 0) - (b.episode_return or 0)) for a, b in pairs]
            rows.append(
                {
                    "env": env,
                    "actions": kind,
                    "episodes": episodes,
                    "differ": sum(a.digest != b.digest for a, b in pairs),
                    "largest_change": max(change),
                    "mean_return": statistics.mean(a.episode_return or 0 for a, _ in pairs),
                }
            )
    head = ["env", "actions", "episodes that differ from the CPU's", "largest change of a return",
            "mean return"]  # fmt: skip
    body = [
        [row["env"], row["actions"], f"{row['differ']} of {row['episodes']}",
         f"{row['largest_change']:.2g}", f"{row['mean_return']:.4g}"]
        for row in rows
    ]  # fmt: skip
    return {"beside_cpu": rows, "table": _table(head, body)}


def times(device: torch.device, quick: bool) -> Row:
    """Time per step of all slots, in microseconds, beside that of the CPU; they take turns."""
    most, rounds, widths = (5, 1, [64]) if quick else (200, 2, [64, 512])
    rows = []
    for cells, (slots, batch) in product(widths, ((16, 16), (64, 16), (64, 64))):
        took: list[list[float]] = [[], []]
        collectors = [
            tdcollect.EvaluationCollector(
                CARTPOLE,
                balancing(cells).to(where),
                slots,
                num_envs=slots,
                inference_batch_size=batch,
                max_episode_steps=most,
                **DRAWN,
            )
            for where in ("cpu", device)
        ]
        for turn in range(rounds + 1):
            for collector, times_of in zip(collectors, took, strict=True):
                start = time.perf_counter()
                steps = sum(finished.record.length for finished in collector.run())
                if turn:  # the first warms up
                    times_of.append((time.perf_counter() - start) / steps * slots)
        for collector in collectors:
            collector.close()
        cpu, there = (1e6 * min(values) for values in took)
        rows.append([f"{cells} x {cells}", slots, batch, f"{cpu:.0f}", f"{there:.0f}",
                     f"{cpu / there:.2f}"])  # fmt: skip
    head = [f"{CARTPOLE}, drawn: policy", "slots", "inference batch size",
            "CPU, us per step of all slots", "device", "CPU / device"]  # fmt: skip
    return {"times": rows, "table": _table(head, rows)}


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def _policies() -> dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]]:
    """Policies for CartPole, each with how its actions are chosen."""
    return {
        "64 x 64, most likely": (partial(policy, CARTPOLE, 64), LIKELY),
        "512 x 512, most likely": (partial(policy, CARTPOLE, 512), LIKELY),
        "64 x 64, drawn": (partial(policy, CARTPOLE, 64), DRAWN),
        "512 x 512, drawn": (partial(policy, CARTPOLE, 512), DRAWN),
        "GRU of 64, drawn": (partial(recurrent, GRUModule), DRAWN),
        "LSTM of 64, drawn": (partial(recurrent, LSTMModule), DRAWN),
        "convolution, drawn": (partial(_untrained, _convolution), DRAWN),
        "attention, drawn": (partial(_untrained, _attention), DRAWN),
    }


def _untrained(make: Callable[[], nn.Module]) -> ProbabilisticActor:
    """An actor for CartPole, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _actor(TensorDictModule(make(), ["observation"], ["logits"]))


def _convolution() -> nn.Module:
    rows = nn.Unflatten(-1, (1, 4))
    return nn.Sequential(rows, nn.Conv1d(1, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))


def _attention() -> nn.Module:
    block = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    ends = nn.Flatten(), nn.Linear(256, 2)
    return nn.Sequential(nn.Unflatten(-1, (4, 1)), nn.Linear(1, 64), block, *ends)


def recurrent(kind: type) -> TensorDictSequential:
    """An untrained recurrent actor for CartPole, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        memory = kind(input_size=4, hidden_size=64, in_key="observation", out_key="features")
        logits = TensorDictModule(nn.Linear(64, 2), ["features"], ["logits"])
    return TensorDictSequential(memory, _actor(logits))


def balancing(cells: int) -> ProbabilisticActor:
    """An actor with two layers of so many cells, of which one steers; its episodes are long."""
    first, second = nn.Linear(4, cells), nn.Linear(cells, cells)
    net = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(cells, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        first.weight[0] = torch.tensor([0.01, 0.03, 0.1, 0.1])
        second.weight[0, 0] = 1.0
        net[4].weight[:, 0] = torch.tensor([-100.0, 100.0])
    return _actor(TensorDictModule(net, ["observation"], ["logits"]))


def _actor(logits: TensorDictModule) -> ProbabilisticActor:
    return ProbabilisticActor(logits, ["logits"], ["action"], distribution_class=OneHotCategorical)


def _evaluation(
    env: str, tested: nn.Module, episodes: int, most: int, exploration: dict[str, Any]
) -> Callable[..., tdcollect.EvaluationResult]:
    """A function that evaluates."""
    return partial(
        tdcollect.evaluate,
        env,
        tested,
        episodes,
        max_episode_steps=most,
        progress=False,
        **exploration,
    )


def _envs() -> list[str]:
    mujoco = importlib.util.find_spec("mujoco") is not None
    return [CARTPOLE, CHEETAH] if mujoco else [CARTPOLE]


@contextmanager
def algorithms(strict: bool) -> Iterator[None]:
    """Use deterministic algorithms only, or torch's default ones."""
    before, workspace = torch.are_deterministic_algorithms_enabled(), os.environ.get(WORKSPACE)
    if strict:
        os.environ[WORKSPACE] = ":4096:8"  # cuBLAS reads it as it makes a handle
    torch.use_deterministic_algorithms(strict)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        if workspace is None:
            os.environ.pop(WORKSPACE, None)
