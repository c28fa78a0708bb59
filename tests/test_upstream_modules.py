"""The private names that tdcollect uses of torch and tensordict: failures tell what changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import SafeModule

from tdcollect._upstream import modules as of_modules

# --- torch


class Doubled(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2


def ignore(*args: Any) -> None:
    """A hook that changes nothing."""


@pytest.mark.parametrize(
    ("register", "forward"),
    [
        ("register_forward_hook", True),
        ("register_forward_pre_hook", True),
        ("register_full_backward_hook", False),
        ("register_full_backward_pre_hook", False),
    ],
)
def test_has_hooks_follows_the_hooks_of_a_module(register: str, forward: bool) -> None:
    module = Doubled()
    assert not of_modules.has_hooks(module)
    handle = getattr(module, register)(ignore)
    assert of_modules.has_hooks(module)
    assert of_modules.has_forward_hooks(module) is forward
    handle.remove()
    assert not of_modules.has_hooks(module)
    assert not of_modules.has_forward_hooks(module)


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
        nn.modules.module.register_module_full_backward_pre_hook,
    ],
)
def test_has_hooks_follows_the_hooks_of_all_modules(register: Any) -> None:
    handle = register(ignore)
    try:
        assert of_modules.has_hooks(Doubled())
    finally:
        handle.remove()
    assert not of_modules.has_hooks(Doubled())


def safe_module() -> SafeModule:
    return SafeModule(Doubled(), ["a"], ["b"], spec=Bounded(-1, 1, (2,)), safe=True)


def test_safe_modules_have_one_hook_which_projects_their_outputs() -> None:
    module = safe_module()
    assert of_modules.only_projects(module)
    assert not of_modules.only_projects(Doubled())
    step = TensorDict({"b": torch.tensor([3.0, 0.5])})
    of_modules.project_outputs(module, step, step)
    assert step["b"].tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_other_hooks_beside_the_projection_are_told_apart(register: str) -> None:
    module = safe_module()
    handle = getattr(module, register)(ignore)
    assert not of_modules.only_projects(module)
    handle.remove()
    assert of_modules.only_projects(module)


def test_hooks_of_all_modules_are_none_that_project() -> None:
    handle = nn.modules.module.register_module_forward_hook(ignore)
    try:
        assert not of_modules.only_projects(safe_module())
    finally:
        handle.remove()


def test_is_compiled_follows_module_compile() -> None:
    module = Doubled()
    assert not of_modules.is_compiled(module)
    module.compile(backend="eager")
    assert of_modules.is_compiled(module)


def test_parameters_of_shows_later_changes() -> None:
    linear = nn.Linear(2, 3)
    parameters = of_modules.parameters_of(linear)
    assert parameters == dict(linear.named_parameters())
    linear.weight = nn.Parameter(torch.ones(3, 2))
    assert parameters["weight"] is linear.weight


def test_torch_dispatch_mode_sees_operators_with_a_schema() -> None:
    seen = []

    class Watch(of_modules.TorchDispatchMode):  # type: ignore[misc, name-defined]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(of_modules.schema_of(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.empty(2).normal_(generator=torch.Generator())
    assert [schema.name for schema in seen] == ["aten::empty", "aten::normal_"]
    drawn = {argument.name: argument for argument in seen[1].arguments}
    assert list(drawn) == ["self", "mean", "std", "generator"]
    assert drawn["self"].alias_info.is_write
    assert drawn["generator"].kwarg_only
    assert not drawn["mean"].alias_info


def test_validates_arguments_follows_torchs_default() -> None:
    before = of_modules.validates_arguments()
    try:
        for default in (True, False):
            torch.distributions.Distribution.set_default_validate_args(default)
            assert of_modules.validates_arguments() is default
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


# --- tensordict


def module_of(**options: Any) -> TensorDictModule:
    return TensorDictModule(nn.Linear(2, 2), in_keys=["a"], out_keys=["b"], **options)


def distribution_of(**options: Any) -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"],
        out_keys=["action"],
        distribution_class=torch.distributions.Normal,
        **options,
    )


def test_memmap_type_names_the_class_of_a_saved_tensordict(tmp_path: Path) -> None:
    TensorDict({"a": torch.zeros(1)}).memmap(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta[of_modules.MEMMAP_TYPE] == str(TensorDict)


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (TensorDictSequential, of_modules.SEQUENTIAL_METHODS),
        (ProbabilisticTensorDictSequential, of_modules.SEQUENTIAL_METHODS),
        (ProbabilisticTensorDictModule, of_modules.PROBABILISTIC_METHODS),
        (TensorDictModule, of_modules.MODULE_METHODS),
    ],
)
def test_methods_that_decide_about_a_call_exist(cls: type, names: tuple[str, ...]) -> None:
    of_probabilistic = {"get_dist_params", "det_part", "_last_module"}
    expected = set(names)
    if cls is TensorDictSequential:
        expected -= of_probabilistic
    missing = [name for name in expected if not hasattr(cls, name)]
    assert not missing, f"{cls.__name__} has no {missing} any more"


def test_a_call_of_a_module_goes_through_the_methods_named() -> None:
    """Replaced one by one, each private one changes what is computed, or is not called."""
    cases: list[tuple[Any, TensorDict, tuple[str, ...]]] = [
        (module_of(), TensorDict({"a": torch.ones(2)}), of_modules.MODULE_METHODS),
        (
            distribution_of(),
            TensorDict({"loc": torch.ones(2), "scale": torch.ones(2)}),
            of_modules.PROBABILISTIC_METHODS,
        ),
        (
            TensorDictSequential(module_of()),
            TensorDict({"a": torch.ones(2)}),
            ("_run_module", "_module_iter"),
        ),
    ]
    for module, given, names in cases:
        for name in names:
            if name.startswith("_") and not name.startswith("__"):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(type(module), name, _raise)
                    with pytest.raises(ZeroDivisionError):
                        module(given.clone())


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError


def test_modules_in_order_are_those_that_a_sequence_calls() -> None:
    first, second = module_of(), TensorDictModule(nn.Linear(2, 2), ["b"], ["c"])
    sequence = TensorDictSequential(first, second, first)
    modules = list(of_modules.modules_in_order(sequence))
    assert [id(module) for module in modules] == [id(first), id(second), id(first)]


def test_selects_output_follows_select_out_keys() -> None:
    sequence = TensorDictSequential(module_of())
    assert not of_modules.selects_output(sequence)
    sequence.select_out_keys("b")
    assert of_modules.selects_output(sequence)
    selected = TensorDictSequential(module_of(), selected_out_keys=["b"])
    assert of_modules.selects_output(selected)


def test_draws_sample_is_false_where_the_last_distribution_comes_before_the_end() -> None:
    parameters = TensorDictModule(lambda a: (a, a.exp()), ["a"], ["loc", "scale"])
    drawing = ProbabilisticTensorDictSequential(parameters, distribution_of())
    assert of_modules.draws_sample(drawing)
    assert "action" in drawing(TensorDict({"a": torch.ones(2)}))
    assert not of_modules.draws_sample(ProbabilisticTensorDictSequential(parameters))


def test_has_generator_follows_the_argument() -> None:
    assert not of_modules.has_generator(distribution_of())
    assert of_modules.has_generator(distribution_of(generator=torch.Generator()))
    assert of_modules.has_generator(distribution_of(generator="generator"))


def test_draw_of_is_the_draw_of_a_call() -> None:
    module = distribution_of(default_interaction_type="random")
    given = TensorDict({"loc": torch.zeros(5), "scale": torch.ones(5)})
    torch.manual_seed(0)
    called = module(given.clone())["action"]
    torch.manual_seed(0)
    drawn = of_modules.draw_of(module)(
        module.get_dist(given), interaction_type=InteractionType.RANDOM
    )
    assert torch.equal(called, drawn)


def test_get_options_are_those_given() -> None:
    assert not of_modules.get_options(module_of())
    options = {"as_padded_tensor": True}
    assert of_modules.get_options(module_of(get_kwargs=options)) == options


def test_keyword_names_follow_in_keys() -> None:
    assert of_modules.keyword_names(module_of()) is None
    named = TensorDictModule(lambda x, y: x - y, in_keys={"y": "a", "x": "b"}, out_keys=["c"])
    names = of_modules.keyword_names(named)
    assert names is not None
    assert dict(zip(names, named.in_keys, strict=True)) == {"y": "a", "x": "b"}


@pytest.mark.parametrize(
    ("key", "name"), [("a", "a"), ("a/b", "a%2Fb"), ("..", "%2E%2E"), ("", "%"), ("a%", "a%25")]
)
def test_encode_key_for_filesystem_gives_the_names_of_memory_maps(
    tmp_path: Path, key: str, name: str
) -> None:
    assert of_modules.encode_key_for_filesystem(key) == name
    TensorDict({key: torch.zeros(1)}).memmap(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"meta.json", f"{name}.memmap"}


def test_unchecked_tensordict_is_the_one_that_is_checked() -> None:
    value = torch.zeros(2, 3)
    made = of_modules.unchecked_tensordict({"a": value, "b": {"c": value}}, torch.Size([2]), None)
    checked = TensorDict({"a": value, "b": {"c": value}}, batch_size=[2])
    assert made["a"] is value
    assert made["b"].batch_size == checked["b"].batch_size
    assert type(made["b"]) is TensorDict
    assert list(made.keys(True, True)) == list(checked.keys(True, True))
    made["b", "d"] = value
    assert ("b", "d") in made.keys(True)
    on_cpu = of_modules.unchecked_tensordict(
        {"b": {"c": value}}, torch.Size([2]), torch.device("cpu")
    )
    assert on_cpu["b"].device == torch.device("cpu")
