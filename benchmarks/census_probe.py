"""One package of the census in its own environment: `plain` with gymnasium alone, and `probe`.

    python benchmarks/census_probe.py plain '{"package": "minigrid"}'

Prints a JSON line whenever more of an env is known; census.py takes the last one of each.
`plain` imports neither torch nor tdcollect, unless the package does.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.metadata
import json
import os
import random
import runpy
import signal
import site
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

STEPS = 100  # of each episode that is compared
LONG, LONG_SECONDS = 2000, 0.6  # of each episode that is played for its end
FIRSTS, FIRST_SECONDS = 1000, 1.5  # seeds whose first observations are counted
KEPT = "kept "
"""The begin of each line with a result; packages print lines of their own."""


def main() -> None:
    what, job = sys.argv[1], json.loads(sys.argv[2])
    warnings.simplefilter("ignore")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    if what == "plain":
        for name in job.get("envs") or registered(job):
            tell({"env": name, **plain(name)})
    else:
        for number, name in enumerate(job["envs"]):
            in_a_process(partial(beside_tdcollect, name, number == 0), job["env"])


def imported() -> set[str]:
    """The top modules that census.py's forked processes have imported."""
    import torchrl.envs  # noqa: F401

    import tdcollect.testing.doctor  # noqa: F401

    return {name.partition(".")[0] for name in sys.modules}


def forked(packages: Path, folder: Path, around: dict[str, str], job: dict[str, Any]) -> None:
    """Run `probe` in this process, as if it had begun in the package's environment."""
    os.setsid()
    os.chdir(folder / "home")
    os.environ.update(around)
    with (folder / "said").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    before = [*sys.path]
    site.addsitedir(str(packages))
    sys.path[:] = [path for path in sys.path if path not in before] + before
    sys.argv[1:] = ["probe", json.dumps(job)]
    main()


def tell(found: dict[str, Any]) -> None:
    print(f"\n{KEPT}{json.dumps(found, default=str)}", flush=True)


def in_a_process(call: Callable[[], None], seconds: float) -> None:
    """Call a function in a copy of this process, for some seconds at most."""
    if child := os.fork():
        ends = time.monotonic() + seconds
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > ends:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return
            time.sleep(0.1)
        return
    status = 1
    try:
        call()
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def registered(job: dict[str, Any]) -> Iterator[str]:
    """Two envs that can be made, of those that the package registers; one that says why, else."""
    modules = job.get("modules") or top_modules(job["package"])
    before, errors, imported = set(gym.registry), [], []
    for module in modules:
        try:
            importlib.import_module(module)
            imported.append(module)
        except (Exception, SystemExit) as error:
            errors.append(f"{module}: {said(error)}")
    owned = [
        spec.id
        for spec in gym.registry.values()
        if spec.id not in before
        or top_of(getattr(spec.entry_point, "__module__", spec.entry_point)) in modules
    ]
    old = sys.modules.get("gym")
    if not owned:
        why = "; ".join(errors) or "it registers no env"
        if old and any(top_of(spec.entry_point) in modules for spec in old.envs.registry.values()):
            why = "it registers with gym, not gymnasium"
        tell({"env": None, "why": why})
        return
    count, made = len(owned), 0
    order = dict.fromkeys([0, count - 1, count // 2, count // 4, 3 * count // 4, *range(count)])
    for place in [*order][:9]:
        name = f"{imported[0]}:{owned[place]}" if imported else owned[place]
        try:
            make(name).close()
        except BaseException as error:
            tell({"env": name, "makes": said(error), "of": count})
            continue
        made += 1
        yield name
        if made == 2:
            break


def top_of(entry_point: Any) -> str:
    return str(entry_point).partition(":")[0].partition(".")[0]


def top_modules(package: str) -> list[str]:
    files = importlib.metadata.files(package) or []
    tops = dict.fromkeys(file.parts[0] for file in files if file.suffix == ".py")
    names = [top.removesuffix(".py") for top in tops]
    return [n for n in names if n.isidentifier() and n not in ("tests", "examples", "docs")]


def make(name: str) -> Any:
    path, _, function = name.partition(".py:")
    if function:
        return runpy.run_path(str(Path(__file__).parent / f"{path}.py"))[function]()
    return gym.make(name)


def said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"


# ---- with gymnasium alone


def plain(name: str) -> dict[str, Any]:
    """The results of an env in plain loops, as far as it came."""
    found: dict[str, Any] = {}
    for part in (made, repeats, leaks, first_observations, ends):
        try:
            part(name, found)
        except Exception as error:
            found["raised"] = f"{part.__name__}: {said(error)}"
            if part in (made, repeats):
                break
        tell({"env": name, **found})
    return found


def made(name: str, found: dict[str, Any]) -> None:
    before = global_states()
    env = make(name)
    after = global_states()
    found["makes"] = "yes"
    found["construction_draws"] = [key for key in before if before[key] != after[key]]
    found["observation"] = kind(env.observation_space)
    found["action"] = kind(env.action_space)
    env.close()


def kind(space: Any) -> str:
    if isinstance(space, gym.spaces.Dict):
        return f"Dict({', '.join(map(kind, space.spaces.values()))})"[:80]
    return f"{type(space).__name__}{list(space.shape or ())}"


def global_states() -> dict[str, str]:
    torch = sys.modules.get("torch")
    numpy: Any = np.random.get_state()  # noqa: NPY002  envs may draw from it
    states = {"np.random": digest(numpy), "random": repr(random.getstate())}
    if torch is not None and hasattr(torch, "random"):
        states["torch"] = repr(torch.random.get_rng_state().tolist())
    return states


def repeats(name: str, found: dict[str, Any]) -> None:
    """Digests of the episodes of two seeds, and of the reset after each, on new envs twice."""
    runs = []
    for _ in range(2):
        run = []
        for seed in (0, 1):
            env = make(name)
            run.append((play(env, seed), digest(env.reset()[0])))
            env.close()
        runs.append(run)
    found["digests"], found["after"] = ([one[i] for one in runs[0]] for i in (0, 1))
    found["same_twice"] = found["digests"] == [one[0] for one in runs[1]]
    found["same_after"] = found["after"] == [one[1] for one in runs[1]]


def leaks(name: str, found: dict[str, Any]) -> None:
    """Tell if an env that has been used repeats the episodes of new ones."""
    seen = []
    with closing(make(name)) as env:
        for seed in (0, 1, 0):
            seen.append(play(env, seed))
            env.reset()  # one without a seed, left unfinished
            env.step(sampler(env, seed + 7)())
    first, second = found["digests"]
    found["same_when_used"] = seen == [first, second, first]


def first_observations(name: str, found: dict[str, Any]) -> None:
    """Count the distinct first observations of seeds from 0, for some seconds."""
    seen, began, count = set(), time.process_time(), 0
    with closing(make(name)) as env:
        for seed in range(FIRSTS):
            observation, _ = env.reset(seed=seed)
            seen.add(digest(observation))
            count += 1
            if time.process_time() - began > FIRST_SECONDS:
                break
    found["first_observations"], found["of_seeds"] = len(seen), count


def ends(name: str, found: dict[str, Any]) -> None:
    """The ends of episodes, as lengths and flags; the time limit that gymnasium knows."""
    lengths: list[tuple[int, str]] = []
    with closing(make(name)) as env:
        found["limit"] = None if env.spec is None else env.spec.max_episode_steps
        for seed in range(3):
            env.reset(seed=seed)
            act, began = sampler(env, seed + 100), time.process_time()
            for step in range(1, LONG + 1):
                _, _, terminated, truncated, _ = env.step(act())
                if terminated or truncated:
                    flags = "terminated" * bool(terminated) + "truncated" * bool(truncated)
                    lengths.append((step, flags))
                    break
                if time.process_time() - began > LONG_SECONDS:
                    break
            else:
                step = LONG
            if not lengths or len(lengths) <= seed:
                lengths.append((step, "goes on"))
    found["ends"] = lengths


def sampler(env: Any, seed: int) -> Callable[[], Any]:
    space = copy.deepcopy(env.action_space)
    space.seed(seed)
    return space.sample


def play(env: Any, seed: int) -> str:
    """The digest of an episode's first steps, with actions that follow from the seed."""
    observation, _ = env.reset(seed=seed)
    act, rows = sampler(env, seed + 1000), [observation]
    whole = hashlib.sha256(digest(observation).encode())
    for _ in range(STEPS):
        observation, reward, terminated, truncated, _ = env.step(act())
        row = (digest(observation), digest(reward), bool(terminated), bool(truncated))
        whole.update(repr(row).encode())
        rows.append(row)
        if terminated or truncated:
            break
    return f"{len(rows) - 1} steps {whole.hexdigest()[:16]}"


def digest(value: Any) -> str:
    whole = hashlib.sha256()
    _add(whole, value)
    return whole.hexdigest()[:24]


def _add(whole: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            whole.update(str(key).encode())
            _add(whole, value[key])
    elif isinstance(value, (tuple, list)):
        whole.update(struct.pack("q", len(value)))
        for part in value:
            _add(whole, part)
    elif isinstance(value, (np.ndarray, np.generic, int, float)):
        array = np.asarray(value)
        whole.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    elif hasattr(value, "nodes"):  # gymnasium's graphs
        _add(whole, [value.nodes, value.edges, value.edge_links])
    else:
        whole.update(repr(value).encode())


# ---- with TorchRL and tdcollect


def beside_tdcollect(name: str, first: bool) -> None:
    """The env in collectors, GymEnv and evaluations; a package's first env in the doctor, too."""
    found: dict[str, Any] = {"env": name}
    parts = {
        "rows_make_env": rows_under_make_env,
        "rows_gymenv": rows_under_gymenv,
        "digests": digests,
    }
    if first:
        parts["doctor"] = doctor
    for part, call in parts.items():
        began = time.perf_counter()
        try:
            found[part] = call(name)
        except Exception as error:
            found[part] = said(error)
        found[f"{part}_s"] = round(time.perf_counter() - began, 1)
        tell(found)


def rows_under_make_env(name: str) -> str:
    import tdcollect
    from tdcollect.seeding import slot_seed

    with closing(tdcollect.make_env(_source(name), 1)) as env:
        backend = env.stepper.backend
        return _compared(
            name,
            env,
            lambda row: backend.action.read_slots(env.read_actions(row))[0],
            lambda plain: plain.reset(seed=slot_seed(7, 0)),
        )


def rows_under_gymenv(name: str) -> str:
    from torchrl.envs import GymEnv, GymWrapper

    source = _source(name)
    with closing(GymEnv(name) if source == name else GymWrapper(source())) as env:

        def started(plain: Any) -> Any:
            plain.reset(seed=7)  # GymEnv's set_seed resets the env, and its reset does so again
            return plain.reset()

        return _compared(name, env, lambda row: env.read_action(row["action"]), started)


def _compared(name: str, env: Any, action: Callable[[Any], Any], start: Callable[..., Any]) -> str:
    """Compare the rows of a TorchRL env with a plain loop that takes the same actions."""
    import torch

    torch.manual_seed(0)
    env.set_seed(7)
    row, rows, episodes = env.reset(), 0, 1
    with closing(array_form(name)) as plain:
        observation, _ = start(plain)
        for step in range(2 * STEPS):
            if why := _unlike(plain.observation_space, row, observation):
                return f"step {step}: {why}"
            row = env.rand_action(row)
            observation, reward, terminated, truncated, _ = plain.step(action(row))
            root, row = row, env.step(row)
            following = row["next"]
            if why := _unlike(plain.observation_space, following, observation):
                return f"step {step}, next: {why}"
            pairs = {"reward": np.float32(reward), "terminated": terminated, "truncated": truncated}
            for key, value in pairs.items():
                got = following[key].reshape(-1)[0].item()
                if not (got == value or got != got):
                    return f"step {step}: {key} is {got}, and {value} in a plain loop"
            rows += 1
            if terminated or truncated:
                observation, _ = plain.reset()
                row = env.reset(following.clone()) if env.batch_size else env.reset()
                episodes += 1
            else:
                row = following.clone()
            del root
    return f"equal: {rows} rows, {episodes} episodes"


def _unlike(space: Any, row: Any, observation: Any, path: tuple[str, ...] = ()) -> str:
    if isinstance(space, gym.spaces.Tuple) and row.get("0") is None:  # parts alike are stacked
        space, observation = None, np.stack(observation)
    if isinstance(space, gym.spaces.Dict):
        parts = [(key, part, observation[key]) for key, part in space.spaces.items()]
    elif isinstance(space, gym.spaces.Tuple):
        parts = [(str(i), part, observation[i]) for i, part in enumerate(space.spaces)]
    else:
        entries = row.keys(True, True)
        ways: list[Any] = [path or "observation", ("observation", *path), (*path, "pixels")]
        key = next((one for one in [*ways, path[-1:], "pixels"] if one and one in entries), None)
        if key is None:
            return f"no entry {path}"
        got = row[key].cpu().numpy()
        wanted = np.asarray(observation).astype(got.dtype if got.dtype != bool else None)
        if isinstance(space, gym.spaces.Discrete) and got.size == space.n > 1:
            got, wanted = np.argmax(got), np.asarray(int(observation) - space.start)
        if isinstance(space, gym.spaces.MultiDiscrete) and got.size == space.nvec.sum():
            ends = np.cumsum(space.nvec.ravel())[:-1]
            got = np.array([part.argmax() for part in np.split(got.ravel(), ends)])
        if got.size != wanted.size:
            return f"{key}: shape {got.shape}, and {wanted.shape} in a plain loop"
        got, wanted = np.ravel(got), np.ravel(wanted)
        unlike = ~((got == wanted) | ((got != got) & (wanted != wanted)))
        at = int(unlike.argmax())
        return f"{key}[{at}]: {got[at]}, and {wanted[at]} in a plain loop" if unlike.any() else ""
    return next(filter(None, (_unlike(s, row, o, (*path, k)) for k, s, o in parts)), "")


def array_form(name: str) -> Any:
    """The env without entries that have no array form, such as texts, if it has such."""
    env = make(name)
    space = env.observation_space
    if not isinstance(space, gym.spaces.Dict):
        return env
    texts = [key for key, part in space.spaces.items() if isinstance(part, gym.spaces.Text)]
    texts += [key for key, part in space.spaces.items() if "Mission" in type(part).__name__]
    if not texts:
        return env
    return gym.wrappers.FilterObservation(env, [key for key in space.spaces if key not in texts])


def _source(name: str) -> Any:
    with closing(make(name)) as env, closing(array_form(name)) as taken:
        plain = type(env) is type(taken) and ".py:" not in name
    return name if plain else partial(array_form, name)


def digests(name: str) -> str:
    """The digest of eight episodes, in one slot, in eight and in worker processes."""
    import tdcollect

    seen: dict[str, list[str]] = {}
    source, fresh = _source(name), False
    for way in ({"num_envs": 1}, {"num_envs": 8}, {"num_envs": 8, "backend": "process"}):
        try:
            result = tdcollect.evaluate(
                source, None, episodes=8, max_episode_steps=30, progress=False, **way
            )
        except Exception as error:
            return f"{way}: {said(error)}"
        if failed := sum(one.status == "failed" for one in result.episodes):
            return f"{way}: {failed} of 8 episodes failed"
        fresh |= bool(result.manifest.get("fresh_envs"))
        seen.setdefault(result.digest[:12], []).append(str(way))
    if len(seen) == 1:
        return f"one: {next(iter(seen))}" + (", new envs" if fresh else "")
    return "; ".join(f"{', '.join(ways)}: {value}" for value, ways in seen.items())


def doctor(name: str) -> dict[str, Any]:
    from tdcollect.testing import diagnose

    return diagnose(
        name if ".py:" not in name else _source(name), max_episode_steps=STEPS
    ).to_dict()


if __name__ == "__main__":
    if sys.argv[1] == "probe":
        imported()
    main()
