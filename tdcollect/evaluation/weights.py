"""Weights of models on their way to another process."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.envs import EnvBase, Transform, TransformedEnv
from torchrl.envs import transforms as T
from torchrl.weight_update import WeightStrategy

from tdcollect.evaluation.workers.protocol import pickled_part

POLICY = "policy"
_TRANSFORM = re.compile(r"env\.transform\[(\d+)\]")
_EXTRA_STATE = "__extra_state__"  # where TorchRL's WeightStrategy puts that of the module itself


class Weights(NamedTuple):
    """The weights of one model.

    Attributes:
        tensors: parameters and buffers, as ``TensorDict.from_module`` nests them.
        states: the extra states of its modules (``get_extra_state``), by the module's name.
    """

    tensors: TensorDictBase
    states: dict[str, Any]


def check_model_ids(ids: Iterable[Any], what: str) -> None:
    """Refuse model ids that no evaluation has."""
    for name in ids:
        if name != POLICY and not (isinstance(name, str) and _TRANSFORM.fullmatch(name)):
            raise ValueError(
                f"expected the keys of {what} to be 'policy' or 'env.transform[0]', "
                f"'env.transform[1]'..., got {name!r}"
            )


def extracted(module: nn.Module) -> TensorDict:
    """Return a copy of a module's parameters and buffers, detached, on the CPU."""
    return TensorDict.from_module(module).data.detach().clone().cpu()


def snapshot(source: Any, model_id: str) -> bytes:
    """Return the weights of a module or TensorDict as they are now, pickled."""
    states: dict[str, Any] = {}
    if isinstance(source, TensorDictBase):
        tensors = source.data.detach().clone().cpu()
    elif isinstance(source, nn.Module):
        tensors = extracted(source)
        states = extra_states(source)
    else:
        raise TypeError(
            f"expected the weights of {model_id!r} to be a module or a TensorDict, got "
            f"{type(source).__name__}; pass the module, or TensorDict.from_module(module).data"
        )
    return pickle.dumps(Weights(tensors, states), protocol=pickle.HIGHEST_PROTOCOL)


def snapshots_of(
    weights: Any, by_id: Mapping[str, Any] | None, policy: Any
) -> tuple[dict[str, bytes], bytes | None]:
    """Return the weights of a request as they are now, pickled, by model id.

    Args:
        weights: those of the policy, unless ``by_id`` has them; or None.
        by_id: weights by model id.
        policy: the evaluator's own, whose weights are taken if none are given; or None.

    Returns:
        The weights; and the policy itself, pickled, if it is taken and no module: what it holds
        may have changed.
    """
    given = dict(by_id or {})
    check_model_ids(given, "weights_dict")
    if weights is not None:
        given.setdefault(POLICY, weights)
    itself = None
    if POLICY not in given and isinstance(policy, nn.Module):
        given[POLICY] = policy
    elif POLICY not in given and policy is not None:
        itself = pickled_part(POLICY, policy)
    return {name: snapshot(source, name) for name, source in given.items()}, itself


def extra_states(module: nn.Module) -> dict[str, Any]:
    """Return the extra states of a module and of those in it, by name; running statistics, say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # VecNormV2 warns that it has none yet
        return {
            name: state
            for name, part in module.named_modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
            and (state := part.get_extra_state())
        }


def unpickled_weights(weights: Mapping[str, bytes]) -> tuple[Weights | None, dict[str, Weights]]:
    """Return pickled weights: those of the policy, if it has any, and the others by model id."""
    given: dict[str, Weights] = {name: pickle.loads(blob) for name, blob in weights.items()}
    return given.pop(POLICY, None), given


def set_policy(policy: Any, weights: Weights) -> None:
    """Set the weights of a policy, in place."""
    if not isinstance(policy, nn.Module):
        raise TypeError(
            f"expected no weights for a policy that is not a module, got some for "
            f"{type(policy).__name__}; make it a module, or leave weights out"
        )
    _set(policy, weights, "the policy")


def set_transforms(env: EnvBase, weights: Mapping[str, Weights]) -> None:
    """Set the statistics of an env's transforms, by model id, in place."""
    for model_id, given in weights.items():
        _set(_transform(env, model_id), given, f"the transform {model_id!r}")


def _transform(env: EnvBase, model_id: str) -> Transform:
    found = _TRANSFORM.fullmatch(model_id)
    assert found is not None  # check_model_ids has looked
    outer = env.transform if isinstance(env, TransformedEnv) else None
    there = [] if outer is None else [*outer] if isinstance(outer, T.Compose) else [outer]
    index = int(found[1])
    if index >= len(there):
        names = ", ".join(type(transform).__name__ for transform in there) or "none"
        raise ValueError(
            f"expected weights of models that the evaluation has, got {model_id!r}; the env's "
            f"transforms are: {names}"
        )
    return there[index]


def _set(module: nn.Module, weights: Weights, what: str) -> None:
    tensors = weights.tensors
    own = tensors.exclude(_EXTRA_STATE) if _EXTRA_STATE in tensors.keys() else tensors  # noqa: SIM118
    here, there = _shapes(TensorDict.from_module(module)), _shapes(own)
    names = {name for name, _ in module.named_modules()}
    odd = [
        *(f"no {name}" for name in sorted(here.keys() - there.keys())),
        *(f"{name}, which it lacks" for name in sorted(there.keys() - here.keys())),
        *(
            f"{name} of shape {there[name]} for {here[name]}"
            for name in sorted(here.keys() & there.keys())
            if here[name] != there[name]
        ),
        *(f"an extra state of {name!r}" for name in sorted(weights.states.keys() - names)),
    ]
    if odd:
        more = f" and {len(odd) - 3} more differences" if len(odd) > 3 else ""
        raise ValueError(
            f"expected weights with the entries of {what}, {type(module).__name__}, got "
            f"{'; '.join(odd[:3])}{more}; pass the model that is evaluated, or a TensorDict of it"
        )
    with warnings.catch_warnings(), torch.no_grad():
        # VecNormV2 warns that statistics are not shared between processes, as they need not be.
        warnings.filterwarnings("ignore", "VecNorm wasn't initialized")
        WeightStrategy(extract_as="tensordict").apply_weights(module, tensors)
        for name, state in weights.states.items():
            module.get_submodule(name).set_extra_state(copy.deepcopy(state))


def _shapes(tensors: TensorDictBase) -> dict[str, list[int]]:
    return {
        ".".join(key) if isinstance(key, tuple) else key: list(value.shape)
        for key, value in tensors.items(True, True)
    }
