"""A reward of named components, for presets that normalise each of them."""

from areal_jax.records import Task


def boxed_and_short(task: Task, answer: str) -> dict[str, float]:
    """Return whether the last box has the reference, which is the reward, and how short the answer
    is.
    """
    _, box, rest = answer.rpartition("\\boxed{")
    is_correct = float(rest.partition("}")[0] == task.answer)
    return {
        "score": is_correct,
        "correct": is_correct,
        "short": max(0.0, 1.0 - len(answer) / 400) if box else 0.0,
    }
