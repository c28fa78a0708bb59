"""Private names of other packages are used in ``tdcollect/_upstream/`` only."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from textwrap import dedent
from typing import Any

import pytest
from torchrl.collectors import Collector as TorchRLCollector
from torchrl.envs import EnvBase, Transform
from torchrl.envs import ParallelEnv as TorchRLParallelEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from .private_names import Names, check_module, check_source, is_foreign, is_private, modules

OVERRIDDEN = {
    "Collector": {
        "_increment_frames",
        "_init_env",
        "_init_policy",
        "_make_carrier",
        "_maybe_make_final_rollout",
        "_maybe_setup_policy_env_transforms",
        "_postproc",
        "_setup_frames_per_batch",
        "_setup_policy_and_weights",
    },
    "GymnasiumEnv": {"_reset", "_set_seed", "_step"},
    "ParallelEnv": {"_create_td", "_reset", "_shutdown_workers", "_start_workers", "_step"},
    "TorchCountingEnv": {"_reset", "_set_seed", "_step"},
    "EnvAction": {"_reset", "_step"},
    "ActionMasks": {"_call", "_reset"},
    "RayCollector": {"_async_iterator", "_run_collection_loop", "_sync_iterator"},
    "DistributedCollector": {"_iterator_dist", "_make_container", "_next_async", "_next_sync"},
    "DistributedSyncCollector": {"_iterator_dist", "_make_container"},
}
"""The private methods of other packages that tdcollect's classes define anew."""

METHODS = [
    *((TorchRLCollector, name) for name in sorted(OVERRIDDEN["Collector"])),
    *((EnvBase, name) for name in ("_reset", "_set_seed", "_step")),
    *((TorchRLParallelEnv, name) for name in ("_reset", "_start_workers", "_step")),
    *((BatchedEnvBase, name) for name in ("_create_td", "_shutdown_workers")),
    *((Transform, name) for name in ("_call", "_reset", "_step")),
]


def test_private_names_of_other_packages_are_used_in_one_place_only() -> None:
    uses = [
        f"{name}:{use.line}: {use.name} {use.why}"
        for name, source in modules()
        for use in check_module(name, source).uses
    ]
    assert not uses, (
        "expected private names of other packages in tdcollect/_upstream/ only, got\n"
        + "\n".join(uses)
        + "\nmove them there under a plain name, and add them to tests/upstream/test_names.py"
    )


def test_private_methods_are_defined_anew_where_a_subclass_must() -> None:
    found: dict[str, set[str]] = {}
    for name, source in modules():
        for cls, method in check_module(name, source).overrides:
            found.setdefault(cls, set()).add(method)
    assert found == OVERRIDDEN


@pytest.mark.parametrize(("parent", "name"), METHODS, ids=lambda value: str(value))
def test_upstream_has_and_calls_the_methods_that_are_defined_anew(parent: Any, name: str) -> None:
    assert callable(vars(parent).get(name)), f"{parent.__name__}.{name} is gone"
    called = re.compile(rf"\.{name}\(")
    places = [import_module(parent.__module__), import_module("torchrl.envs.transforms._base")]
    assert any(called.search(inspect.getsource(place)) for place in places), f"{name} is not called"


@pytest.mark.parametrize("cls", OVERRIDDEN)
def test_methods_that_are_defined_anew_take_what_upstream_passes(cls: str) -> None:
    for module_name, _ in modules():
        ours = vars(import_module(module_name)).get(cls)
        if isinstance(ours, type) and ours.__module__ == module_name:
            break
    else:
        pytest.fail(f"tdcollect has no class {cls}")
    for name in OVERRIDDEN[cls]:
        parent = next(c for c in ours.__mro__ if is_foreign(c.__module__) and name in vars(c))
        _check_takes(getattr(ours, name), vars(parent)[name])


def _check_takes(ours: Any, theirs: Any) -> None:
    """A call that fits upstream's method fits ours: as many by position, and the same names."""
    mine = inspect.signature(ours).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in mine) and any(p.kind is p.VAR_KEYWORD for p in mine):
        return
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(theirs).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return  # a decorator hides what upstream's method takes
    asked = [p.name for p in parameters if p.kind in positional]
    given = [p.name for p in mine if p.kind in positional]
    assert len(given) == len(asked), f"{ours.__qualname__}{given}, upstream has {asked}"


# --- the checker itself

CHILD = {"Child": Names(inherited=frozenset({"_theirs", "_step"}), own=frozenset({"_mine"}))}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch._utils import thing", "_utils"),
        ("from torch.utils import _thing", "_thing"),
        ("from torch.utils import _thing as thing", "_thing"),
        ("import torch._C", "_C"),
        ("from tdcollect._upstream.torchrl import _module", "_module"),
        ("module._kwargs", "_kwargs"),
        ("a.b[0]._kwargs = 1", "_kwargs"),
        ("a.module._global_forward_hooks", "_global_forward_hooks"),
        ("getattr(module, '_kwargs', None)", "_kwargs"),
        ("'_kwargs' in vars(module)", "_kwargs"),
        ("settings(_use_buffers=False)", "_use_buffers"),
        ("class Child:\n    def f(self): self._theirs", "_theirs"),
        ("class Child:\n    def f(self): self._theirs = 1", "_theirs"),
        ("class Child:\n    _theirs: int", "_theirs"),
        ("class Child:\n    _theirs = 1", "_theirs"),
        ("class Child:\n    def f(self): self._unknown", "_unknown"),
        ("class Child:\n    def f(self): super()._step()", "_step"),
        ("class Child:\n    def _step(self): super()._theirs()", "_theirs"),
        ("class Child:\n    def _step(self): self.env._step()", "_step"),
        ("class Child:\n    def _step(self): pass\ndef f(child): child._mine", "_mine"),
        ("class Child:\n    def f(self, pool): pool._theirs", "_theirs"),
    ],
)
def test_the_checker_finds(source: str, name: str) -> None:
    assert [use.name for use in check_source(dedent(source), CHILD).uses] == [name]


@pytest.mark.parametrize(
    "source",
    [
        "from torch import nn",
        "from tdcollect._upstream.torchrl import has_hooks",
        "from tdcollect.testing.counting import _MOST",
        "from __future__ import annotations",
        "module.__dict__['forward']",
        "def f(_, __): return _.x",
        "_local = 1\nprint(_local)",
        "present._replace(a=1)",
        "class Child:\n    def f(self): return self._mine",
        "class Child:\n    def f(self, other): return other._mine",
        "class Child:\n    def _step(self): return super()._step()",
        "class Child:\n    def _step(self): pass\n    def f(self): self._step()",
        "class Ours:\n    def __init__(self): self._x = 1\n    def f(self): self._x",
    ],
)
def test_the_checker_allows(source: str) -> None:
    assert not check_source(dedent(source), CHILD).uses


def test_the_checker_tells_methods_that_are_defined_anew() -> None:
    source = "class Child:\n    def _step(self): pass\n    def _own(self): pass"
    assert check_source(source, CHILD).overrides == {("Child", "_step")}


def test_an_offence_in_a_module_of_tdcollect_is_found() -> None:
    sources = dict(modules())
    name = "tdcollect.envs.wrapper"
    assert not check_module(name, sources[name]).uses
    for offence in ("self._has_dynamic_specs", "self.transform._call", "self._parameters"):
        changed = sources[name].replace(
            "    def _step(", f"    def inserted(self): {offence}\n\n    def _step(", 1
        )
        assert [use.name for use in check_module(name, changed).uses] == [offence.split(".")[-1]]


@pytest.mark.parametrize(
    ("name", "private"),
    [("_a", True), ("_A1", True), ("_", False), ("__a", False), ("__a__", False), ("a_", False)],
)
def test_what_is_private(name: str, private: bool) -> None:
    assert is_private(name) is private
