"""Scripts of ``sota-implementations/`` on MuJoCo."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torchrl.data import Unbounded
from torchrl.envs import (
    CatTensors,
    ClipTransform,
    Compose,
    DoubleToFloat,
    EnvBase,
    EnvCreator,
    FrameSkipTransform,
    InitTracker,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    VecNorm,
)
from torchrl.envs.transforms import RNDTransform
from torchrl.modules import (
    MLP,
    AdditiveGaussianModule,
    BatchRenorm1d,
    DreamerActor,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    RSSMPosterior,
    RSSMPrior,
    SafeModule,
    SafeProbabilisticModule,
    SafeProbabilisticTensorDictSequential,
    SafeSequential,
    TanhModule,
    TanhNormal,
)

from .classic import SOTA, TRAINER, trainer_actor, trainer_env
from .modules import bounds, ppo_actor, relu_mlp, sac_actor
from .pipeline import SEED, Envs, Pipeline, Size, initialized, script

CHEETAH = "HalfCheetah-v5"
V5 = "HalfCheetah-v5 for v4"
OBSERVATION = ["observation"]


def _stack(size: Size) -> Compose:
    steps = StepCounter(size.limit(1000))
    return Compose(InitTracker(), steps, DoubleToFloat(), RewardSum())


def _batched(envs: Envs, size: Size, slots: int, **kwargs: Any) -> EnvBase:
    make = partial(envs.GymEnv, CHEETAH, device="cpu", from_pixels=False, pixels_only=False)
    env = envs.ParallelEnv(
        min(slots, size.slots),
        EnvCreator(partial(make, **size.gym())),
        serial_for_single=True,
        **kwargs,
    )
    env.set_seed(SEED)
    return env


def _single(envs: Envs, size: Size, *transforms: Any) -> EnvBase:
    env = TransformedEnv(
        envs.GymEnv(CHEETAH, device="cpu", from_pixels=False, pixels_only=False, **size.gym())
    )
    for transform in transforms:
        env.append_transform(transform)
    return env


@script(f"{SOTA}/sac/sac.py", "mujoco", note=V5, sets_seed=True)
def sac(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(_batched(envs, size, 8), _stack(size))
    options = size.options(1000, 25_000, device="cpu")
    return Pipeline(env, initialized(sac_actor(env), env), options, seeded=True)


@script(f"{SOTA}/sac/sac-async.py", "mujoco", note=f"{V5}; one of its collectors", sets_seed=True)
def sac_async(envs: Envs, size: Size) -> Pipeline:
    def make() -> EnvBase:
        return TransformedEnv(_batched(envs, size, 8), _stack(size))

    proof = _single(envs, size, _stack(size))
    options = size.options(1000, device="cpu", env_device="cpu", postproc=_flatten)
    return Pipeline(make, initialized(sac_actor(proof), proof), options, seeded=True)


def _flatten(batch: Any) -> Any:
    return batch.reshape(-1)


@script(f"{SOTA}/tqc/tqc.py", "mujoco", note=f"{V5}; as sac.py", sets_seed=True)
def tqc(envs: Envs, size: Size) -> Pipeline:
    return sac(envs, size)


@script(f"{SOTA}/crossq/crossq.py", "mujoco", note=V5, sets_seed=True)
def crossq(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(_batched(envs, size, 1), _stack(size))
    norm = {"momentum": 0.01, "num_features": 256, "warmup_steps": 100_000}
    net = MLP(
        num_cells=[256, 256],
        out_features=12,
        activation_class=nn.ReLU,
        norm_class=BatchRenorm1d,
        norm_kwargs=norm,
    )
    policy = initialized(sac_actor(env, net, safe_tanh=True).eval(), env)
    return Pipeline(env, policy, size.options(1000, 25_000, device="cpu"), seeded=True)


@script(f"{SOTA}/td3/td3.py", "mujoco", note=V5, sets_seed=True)
def td3(envs: Envs, size: Size) -> Pipeline:
    stack = Compose(
        StepCounter(max_steps=size.limit(1000)), InitTracker(), DoubleToFloat(), RewardSum()
    )
    env = TransformedEnv(_batched(envs, size, 8, device="cpu"), stack)
    spec = env.action_spec_unbatched
    actor = TensorDictSequential(
        TensorDictModule(relu_mlp(spec.shape[-1]), OBSERVATION, ["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=spec),
    )
    noise = AdditiveGaussianModule(
        spec=spec, sigma_init=1, sigma_end=1, mean=0, std=0.1, device="cpu"
    )
    policy = TensorDictSequential(initialized(actor, env), noise)
    options = size.options(1000, 25_000, device="cpu", reset_at_each_iter=False)
    return Pipeline(env, policy, options, seeded=True)


@script(f"{SOTA}/ddpg/ddpg.py", "mujoco", note=V5, sets_seed=True)
def ddpg(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(_batched(envs, size, 1), _stack(size))
    spec = env.action_spec_unbatched
    actor = TensorDictSequential(
        TensorDictModule(relu_mlp(spec.shape[-1]), OBSERVATION, ["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"]),
    )
    noise = OrnsteinUhlenbeckProcessModule(
        spec=spec, annealing_num_steps=1_000_000, device="cpu", safe=False
    )
    policy = TensorDictSequential(initialized(actor, env), noise)
    options = size.options(1000, 25_000, device="cpu", reset_at_each_iter=False)
    return Pipeline(env, policy, options, seeded=True)


@script(f"{SOTA}/offline_to_online/train.py", "mujoco", note=V5)
def offline_to_online(envs: Envs, size: Size) -> Pipeline:
    env = TransformedEnv(envs.GymEnv(CHEETAH, device="cpu", **size.gym()), DoubleToFloat())
    env.set_seed(SEED)
    net = nn.Sequential(MLP(17, 12, num_cells=[256, 256]), NormalParamExtractor())
    policy = ProbabilisticActor(
        TensorDictModule(net, OBSERVATION, ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
        distribution_kwargs=bounds(env),
        return_log_prob=True,
    )
    options = size.options(1000, device="cpu", init_random_frames=0)
    return Pipeline(env, policy, options, seeded=True)


@script(f"{SOTA}/a2c/a2c_mujoco.py", "mujoco", note=V5)
def a2c_mujoco(envs: Envs, size: Size) -> Pipeline:
    env = _single(
        envs,
        size,
        RewardSum(),
        StepCounter(),
        VecNorm(in_keys=OBSERVATION),
        ClipTransform(in_keys=OBSERVATION, low=-10, high=10),
        DoubleToFloat(in_keys=OBSERVATION),
    )
    options = size.options(
        640, device="cpu", storing_device="cpu", max_frames_per_traj=-1, trust_policy=True
    )
    return Pipeline(env, ppo_actor(env, safe_tanh=True), options)


def _normalized(envs: Envs, size: Size, *transforms: Any) -> EnvBase:
    return _single(
        envs,
        size,
        VecNorm(in_keys=OBSERVATION, decay=0.99999, eps=1e-2),
        ClipTransform(in_keys=OBSERVATION, low=-10, high=10),
        RewardSum(),
        StepCounter(),
        DoubleToFloat(in_keys=OBSERVATION),
        *transforms,
    )


@script(f"{SOTA}/ppo/ppo_mujoco.py", "mujoco", note=V5)
def ppo_mujoco(envs: Envs, size: Size) -> Pipeline:
    env = _normalized(envs, size)
    options = size.options(2048, device="cpu", max_frames_per_traj=-1)
    return Pipeline(env, ppo_actor(env, scale_lb=1e-8), options)


@script(f"{SOTA}/gail/gail.py", "mujoco", note=f"{V5}; as ppo_mujoco.py")
def gail(envs: Envs, size: Size) -> Pipeline:
    return ppo_mujoco(envs, size)


@script(f"{SOTA}/rnd/rnd_mujoco.py", "mujoco", note=V5)
def rnd_mujoco(envs: Envs, size: Size) -> Pipeline:
    target = nn.Sequential(nn.Linear(17, 64), nn.ReLU(), nn.Linear(64, 64))
    predictor = nn.Sequential(
        nn.Linear(17, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)
    )
    novelty = RNDTransform(
        target_network=target.requires_grad_(False),
        predictor_network=predictor,
        normalize_obs=False,
        reward_clip=5.0,
    )
    env = _normalized(envs, size, novelty)
    options = size.options(2048, device="cpu", max_frames_per_traj=-1)
    return Pipeline(env, ppo_actor(env, scale_lb=1e-8), options)


@script(f"{SOTA}/redq/redq.py", "mujoco", note=f"{V5}; one of its two collectors", sets_seed=True)
def redq(envs: Envs, size: Size) -> Pipeline:
    def make() -> EnvBase:
        return TransformedEnv(
            envs.GymEnv(
                CHEETAH,
                device="cpu",
                frame_skip=1,
                from_pixels=0,
                pixels_only=0,
                categorical_action_encoding=None,
                **size.gym(),
            ),
            Compose(
                RewardScaling(0.0, 5.0),
                CatTensors(in_keys=OBSERVATION, out_key="observation_vector"),
                ObservationNorm(0.0, 2.0, in_keys=["observation_vector"], standard_normal=True),
                DoubleToFloat(),
                StepCounter(),
                InitTracker(),
            ),
        )

    proof = make()
    spec = proof.action_spec_unbatched
    net = nn.Sequential(
        MLP(17, 12, num_cells=[256, 256], activation_class=nn.ELU),
        NormalParamExtractor(scale_mapping="biased_softplus_1.0", scale_lb=0.05),
    )
    actor = ProbabilisticActor(
        SafeModule(net, in_keys=["observation_vector"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        distribution_kwargs={**bounds(proof), "tanh_loc": False},
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=True,
    )
    noise = OrnsteinUhlenbeckProcessModule(
        spec=actor.spec, annealing_num_steps=1_000_000, sigma=0.2, theta=0.15, device="cpu"
    )
    options = size.options(1024, 50_000, device="cpu", max_frames_per_traj=-1, split_trajs=True)
    return Pipeline(EnvCreator(make), TensorDictSequential(actor, noise), options)


@script(
    f"{SOTA}/dreamer/dreamer.py",
    "mujoco",
    note="gymnasium's HalfCheetah-v5 for DMControl's cheetah, states for pixels; 1 of 7 collectors",
    sets_seed=True,
)
def dreamer(envs: Envs, size: Size) -> Pipeline:
    def slot() -> EnvBase:
        env = envs.GymEnv(CHEETAH, device="cpu", from_pixels=False, pixels_only=False, **size.gym())
        env = TransformedEnv(env, FrameSkipTransform(2))
        hidden = {"state": Unbounded(shape=(30,)), "belief": Unbounded(shape=(200,))}
        return env.append_transform(
            TensorDictPrimer(random=False, default_value=0, expand_specs=True, **hidden)
        )

    def make() -> EnvBase:
        env = TransformedEnv(
            envs.SerialEnv(min(8, size.slots), EnvCreator(slot), serial_for_single=True)
        )
        for transform in (DoubleToFloat(), RewardSum(), StepCounter(size.limit(500))):
            env.append_transform(transform)
        env.set_seed(0)
        return env

    options = size.options(
        1000, 10_000, policy_device="cpu", env_device="cpu", storing_device="cpu"
    )
    return Pipeline(make, _dreamer_actor(slot()), options, seeded=True)


def _dreamer_actor(env: EnvBase) -> Any:
    spec = env.action_spec_unbatched
    encoder = MLP(17, 1024, depth=2, num_cells=400, activation_class=nn.ELU)
    prior = RSSMPrior(
        hidden_dim=200,
        rnn_hidden_dim=200,
        state_dim=30,
        action_spec=env.action_spec,
        action_dim=spec.shape[-1],
    )
    posterior = RSSMPosterior(hidden_dim=200, state_dim=30, rnn_hidden_dim=200, obs_embed_dim=1024)
    actor = SafeProbabilisticTensorDictSequential(
        SafeModule(
            DreamerActor(
                out_features=spec.shape[-1], depth=3, num_cells=400, activation_class=nn.ELU
            ),
            in_keys=["state", "belief"],
            out_keys=["loc", "scale"],
        ),
        SafeProbabilisticModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            default_interaction_type=InteractionType.DETERMINISTIC,
            distribution_class=TanhNormal,
            distribution_kwargs={"tanh_loc": True},
            spec=env.full_action_spec_unbatched,
        ),
    )
    policy = SafeSequential(
        SafeModule(encoder, in_keys=OBSERVATION, out_keys=["encoded_latents"]),
        SafeModule(posterior, in_keys=["belief", "encoded_latents"], out_keys=["_", "_", "state"]),
        actor,
        SafeModule(
            prior,
            in_keys=["state", "belief", "action"],
            out_keys=["_", "_", "_", ("next", "belief")],
        ),
    )
    noise = AdditiveGaussianModule(
        spec=env.action_spec,
        sigma_init=1.0,
        sigma_end=1.0,
        annealing_num_steps=1,
        mean=0.0,
        std=0.3,
        device="cpu",
    )
    fake = DoubleToFloat()
    with torch.no_grad():
        policy(fake(env.fake_tensordict()))
    return TensorDictSequential(policy, noise)


@script(f"{SOTA}/sac_trainer/train.py", "mujoco", note=f"{V5}; {TRAINER}; 1 of 4 collectors")
def sac_trainer(envs: Envs, size: Size) -> Pipeline:
    env = trainer_env(envs, size, 4, CHEETAH, *_trainer_stack(size))
    return Pipeline(env, trainer_actor(17, 6, 256), size.options(1000, 2500), seeded=True)


@script(f"{SOTA}/cql_trainer/train.py, iql_trainer/train.py", "mujoco", note=f"{V5}; {TRAINER}")
def cql_trainer(envs: Envs, size: Size) -> Pipeline:
    env = trainer_env(envs, size, 1, CHEETAH, *_trainer_stack(size))
    return Pipeline(env, trainer_actor(17, 6, 256), size.options(1000, 5000), seeded=True)


def _trainer_stack(size: Size) -> list[Any]:
    total = partial(RewardSum, ["reward"], ["reward_sum"])
    return [partial(StepCounter, max_steps=size.limit(1000)), DoubleToFloat, total]


@script(f"{SOTA}/td3_trainer/train.py", "mujoco", note=f"{V5}; {TRAINER}")
def td3_trainer(envs: Envs, size: Size) -> Pipeline:
    stack = Compose(
        StepCounter(), InitTracker(), DoubleToFloat(), RewardSum(["reward"], ["reward_sum"])
    )
    env = TransformedEnv(trainer_env(envs, size, 8, CHEETAH), stack)
    actor = TensorDictSequential(
        TensorDictModule(relu_mlp(6, inputs=17), OBSERVATION, ["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], low=-1, high=1),
    )
    noise = AdditiveGaussianModule(
        spec=env.action_spec_unbatched,
        sigma_init=1.0,
        sigma_end=1.0,
        annealing_num_steps=1000,
        mean=0.0,
        std=0.1,
    )
    options = size.options(
        1024, device="cpu", env_device="cpu", policy_device="cpu", use_buffers=True
    )
    return Pipeline(env, TensorDictSequential(actor, noise), options, seeded=True)
