"""Custom reward function in one file: the distance to the right number, instead of right or wrong.

    areal-train --exp=own_reward
    areal-train --exp=own_reward num_steps=20 rewards.num_workers=2

Hardware: any, as for --exp=aime, whose other settings it uses. To try your own reward, copy this
file anywhere, change `nearness`, and pass its path as --exp.

The function is called in grading processes and may be `async`. If an answer takes longer than
`rewards.timeout_s`, its process and all child processes are killed. The function returns True,
False, or a number from 0 to 1, the share of the way from `rewards.wrong` to `rewards.correct`; with
`rewards.scale=raw`, any finite number is the reward itself. Functions with the parameters of TRL or
verl work unchanged.

The function is called once before training (also by `--dry-run`) and refused if it fails. A failed
call during training rejects its group; after `rewards.max_consecutive_failures` groups without any
reward the run stops with a checkpoint.
"""

import chz

from areal_jax.config.load import load_experiment


def nearness(task, answer):
    """Return the share of correct digits among three; 0 without a boxed number of at most three."""
    _, box, rest = answer.rpartition("\\boxed{")
    came = rest.partition("}")[0]
    if not (box and came.isdecimal() and len(came) <= 3):
        return 0
    return (
        sum(
            ours == theirs for ours, theirs in zip(came.zfill(3), task.answer.zfill(3), strict=True)
        )
        / 3
    )


aime = load_experiment("aime")
rewards = chz.replace(aime.rewards, function=f"{__file__}:nearness")
experiment = chz.replace(aime, name="own_reward", rewards=rewards)
