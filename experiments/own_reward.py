"""A reward of one's own, in one file: how near a number comes, instead of right or wrong.

    python -m areal_jax.train --exp=own_reward
    python -m areal_jax.train --exp=own_reward num_steps=20 rewards.num_workers=2

Hardware: any, as --exp=aime, whose other settings it takes. To try your own, copy this file
    anywhere, change `nearness`, and give its path as --exp. It is called in grading processes,
    which are killed with all they started when an answer takes longer than `rewards.timeout_s`, and
    it may be `async`. It returns True, False, or a number from 0 to 1: the share of the way from
    `rewards.wrong` to `rewards.correct`; with `rewards.scale=raw` any finite number, the reward
    itself. Functions with TRL's or verl's parameters work as they are. The function is called
    before training, which `--dry-run` does too, and refused if it fails. Later a call that fails
    costs its group: it is not trained on, and after `rewards.max_consecutive_failures` groups
    without any reward the run stops with a checkpoint.
"""

import chz

from areal_jax.config.load import load_experiment


def nearness(task, answer):
    """The share of the three digits that are right; 0 without a boxed number of at most three."""
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
