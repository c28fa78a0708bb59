"""The envs and policies of TorchRL's training scripts, written anew in a few lines each.

Each function takes the env classes that its script imports, and returns what the script hands to
its collector: transforms, modules, distributions and arguments are the script's; its text is not.
"""

from . import atari, classic, examples, mujoco, vmas
from .pipeline import SCRIPTS, SEED, TORCHRL, Envs, Pipeline, Script, Size, obstacles, ours
from .resize import provide

RESIZE_STAND_IN = provide()
"""True if torchvision is not usable, and ``Resize`` calls torch's resampling directly."""

UNAVAILABLE = {
    "sota-implementations/ppo-async": "env of mujoco-torch, batched on a GPU",
    "sota-implementations/dreamer_v3": "env of DMControl",
    "sota-implementations/dreamer/dreamer_isaac.py": "env of IsaacLab",
    "sota-implementations/multiagent_trainer": "env of VMAS, from hydra's configuration",
    "sota-implementations/{expert-iteration,grpo,vla_grpo}": "language models as envs",
    "sota-implementations/{pilco,decision_transformer,bandits,td3_bc,diffusion_bc}": "no collector",
    "examples/collectors/{isaaclab,profile_isaaclab,profile_mujoco_playground}*": "envs on GPUs",
    "examples/{mujoco_macros,satellite}, tutorials mujoco_cube_bowl*": "TorchRL's MuJoCo envs",
    "tutorials multiagent_competitive_ddpg, pettingzoo": "env of PettingZoo",
}
"""Scripts that have no pipeline here, and why."""

__all__ = [
    "RESIZE_STAND_IN",
    "SCRIPTS",
    "SEED",
    "TORCHRL",
    "UNAVAILABLE",
    "Envs",
    "Pipeline",
    "Script",
    "Size",
    "obstacles",
    "ours",
    "provide",
]
_ = (atari, classic, examples, mujoco, vmas)
