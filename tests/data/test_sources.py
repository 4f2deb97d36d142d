from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_jax.data import policy_files
from areal_jax.data.config import Files, Hub, PromptConfig, ReasoningGym, Synthetic
from areal_jax.data.policy_files import EMBEDDED, resolve_policy_folder
from areal_jax.data.problems import SyntheticProblems
from areal_jax.data.sources import TaskSet, format_skipped, load_tasks
from areal_jax.records import Message

BARE = PromptConfig()


def write_lines(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows),
        encoding="utf-8",
    )
    return path


def load(path: Path, prompt: PromptConfig = BARE, **settings: object) -> TaskSet:
    return load_tasks(Files(path=str(path), **settings), prompt)  # type: ignore[arg-type]


def texts(loaded: TaskSet) -> list[tuple[str, str]]:
    return [(task.prompt[-1].content, task.answer) for task in loaded.tasks]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "array.json", "parquet"])
def test_every_file_format_gives_the_same_tasks(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"problem": "1+1?", "answer": "2", "subject": "sums"},
        {"problem": "Größe?", "answer": "042", "subject": "sizes"},
    ]
    path = tmp_path / f"train.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == "array.json":
        path.write_text("\n" + json.dumps(rows, indent=2), encoding="utf-8")
    else:
        write_lines(path, *rows)
    loaded = load(path)
    assert texts(loaded) == [("1+1?", "2"), ("Größe?", "042")]
    assert [task.family for task in loaded.tasks] == ["sums", "sizes"]
    assert [task.id for task in loaded.tasks] == [f"train.{suffix}:1", f"train.{suffix}:2"]
    assert loaded.skipped == {}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("18", "18"),
        ("She makes 9 * 2 = <<9*2=18>>18.\n#### 18", "18"),
        ("#### 1\nno, it is\n#### 1,234 ", "1,234"),
        (142, "142"),
        (142.0, "142"),
        (-3.0, "-3"),
        (0.5, "0.5"),
        (["\\frac{1}{2}"], "\\frac{1}{2}"),
        ("  7\n", "7"),
        (0, "0"),
    ],
)
def test_answers_become_text(tmp_path: Path, answer: object, text: str) -> None:
    assert texts(load(write_lines(tmp_path / "a.jsonl", {"question": "?", "answer": answer}))) == [
        ("?", text)
    ]


def test_prompt_is_the_first_nonempty_prompt_field(
    tmp_path: Path,
) -> None:
    rows = [
        {"prompt": "p", "question": "q", "problem": "b", "answer": "1"},
        {"prompt": "p", "question": "q", "answer": "1"},
        {"prompt": "p", "question": "", "answer": "1"},
    ]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    assert [prompt for prompt, _ in texts(load(path))] == ["b", "q", "p"]
    assert [prompt for prompt, _ in texts(load(path, prompt_field="prompt"))] == ["p", "p", "p"]


def test_dotted_names_select_nested_fields(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"ground_truth": "34", "style": "rule"},
    }
    dotted = {"prompt": "?", "reward_model.ground_truth": "35"}
    path = write_lines(tmp_path / "a.jsonl", row, dotted)
    assert texts(load(path, answer_field="reward_model.ground_truth")) == [("?", "34"), ("?", "35")]


def test_prompt_template_applies_to_every_prompt(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        {"prompt": "1+1?", "answer": "2"},
        {
            "prompt": [{"role": "system", "content": "Old."}, {"role": "user", "content": "2+2?"}],
            "answer": "4",
        },
    )
    plain, chat = load(path, PromptConfig(system="Think.", suffix="\nBox it.")).tasks
    assert plain.prompt == (Message("system", "Think."), Message("user", "1+1?\nBox it."))
    assert chat.prompt == (Message("system", "Think."), Message("user", "2+2?\nBox it."))
    assert load(path).tasks[1].prompt == (Message("system", "Old."), Message("user", "2+2?"))


def test_unusable_rows_are_skipped_by_reason(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        {"problem": "good", "answer": "1"},
        '{"problem": "cut off',
        [1, 2],
        {"answer": "1"},
        {"problem": "  ", "answer": "1"},
        {"problem": "?"},
        {"problem": "?", "answer": ""},
        {"problem": "?", "answer": "no number ####"},
        {"problem": "?", "answer": {"value": 1}},
        {"problem": "?", "answer": True},
        {"problem": "?", "answer": float("nan")},
        {"problem": [{"role": "user", "content": ["an image"]}], "answer": "1"},
        {"problem": "also good", "answer": "2"},
    )
    loaded = load(path)
    assert texts(loaded) == [("good", "1"), ("also good", "2")]
    # Ids are line numbers, so that they stay the same when another row is fixed.
    assert loaded.tasks[1].id == "a.jsonl:13"
    assert loaded.skipped == {
        "not a JSON object": ["a.jsonl:2", "a.jsonl:3"],
        "no prompt": ["a.jsonl:4", "a.jsonl:5"],
        "no answer": ["a.jsonl:6", "a.jsonl:7", "a.jsonl:8"],
        "answer is neither text nor a number": ["a.jsonl:9", "a.jsonl:10", "a.jsonl:11"],
        "prompt is neither text nor messages": ["a.jsonl:12"],
    }


def test_countdown_rows_are_countdown_tasks(tmp_path: Path) -> None:
    bad = [
        {"target": 24, "nums": ["3", 8]},
        {"target": None, "nums": [1]},
        {"target": 1, "nums": []},
    ]
    loaded = load(write_lines(tmp_path / "train.jsonl", {"target": 24, "nums": [3, 8, 5]}, *bad))
    (task,) = loaded.tasks
    assert (task.kind, json.loads(task.answer)) == (
        "countdown",
        {"numbers": [3, 8, 5], "target": 24},
    )
    assert task.prompt[0].content.startswith("Make 24 from the numbers 3, 8, 5,")
    assert loaded.kinds == {"countdown"}
    assert [len(places) for places in loaded.skipped.values()] == [3]


def test_skipped_rows_are_counted_and_the_first_named() -> None:
    assert format_skipped(
        {"no prompt": ["a:1", "a:2"], "no answer": ["b:1", "b:2", "b:3", "b:4"]}
    ) == ("2 no prompt (a:1, a:2), 4 no answer (b:1, b:2, b:3, ...)")


def test_error_without_usable_rows_lists_found_fields(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", {"text": "?", "code": "1"}, {"text": "?", "label": "1"}
    )
    with pytest.raises(
        ValueError,
        match=r"2 no prompt.*problem, question, prompt.*found fields text, code, label; set prompt_f",
    ):
        load(path)
    with pytest.raises(ValueError, match="no rows"):
        load(write_lines(tmp_path / "empty.jsonl"))


def test_max_tasks_limits_rows(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", *({"problem": str(i), "answer": "1"} for i in range(9))
    )
    assert [prompt for prompt, _ in texts(load(path, max_tasks=3))] == ["0", "1", "2"]


def test_success_rate_bounds_filter_rows(tmp_path: Path) -> None:
    rates = [0, 0.05, 0.5, 0.95, 1.0, None, "often", True, 2]
    path = write_lines(
        tmp_path / "p.jsonl",
        *({"problem": f"{rate}?", "answer": "1", "rate": rate} for rate in rates),
    )

    def kept(**bounds: Any) -> tuple[list[str], dict[str, int]]:
        loaded = load(path, success_rate_field="rate", **bounds)
        return [text for text, _ in texts(loaded)], {
            reason: len(places) for reason, places in loaded.skipped.items()
        }

    assert len(load(path).tasks) == len(rates)
    unknown = {"no rate from 0 to 1": 4}
    both = {"success rate at most 0.05": 2, "success rate at least 0.95": 2}
    assert kept(success_rate_above=0.05, success_rate_below=0.95) == (["0.5?"], unknown | both)
    assert kept(success_rate_above=0.0) == (
        ["0.05?", "0.5?", "0.95?", "1.0?"],
        unknown | {"success rate at most 0": 1},
    )
    assert kept(success_rate_below=1.0)[0] == ["0?", "0.05?", "0.5?", "0.95?"]


def test_folder_gives_the_files_of_the_split_in_order(tmp_path: Path) -> None:
    for name in ("train-00001.jsonl", "train-00000.jsonl", "test.jsonl"):
        write_lines(tmp_path / "main" / name, {"problem": name, "answer": "1"})
    assert [prompt for prompt, _ in texts(load(tmp_path))] == [
        "train-00000.jsonl",
        "train-00001.jsonl",
    ]
    assert [prompt for prompt, _ in texts(load(tmp_path / "main", split="test"))] == ["test.jsonl"]


def test_missing_files_are_reported_with_existing_ones(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        load(tmp_path / "nowhere")
    write_lines(tmp_path / "aime.json", {"problem": "?", "answer": "1"})
    with pytest.raises(
        FileNotFoundError,
        match=r"expected files named train\*.jsonl, .json or .parquet, found aime.json",
    ):
        load(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"ends in .jsonl, .json, .parquet"):
        load(tmp_path / "notes.txt")
    for folder in ("main", "socratic"):
        write_lines(tmp_path / folder / "train.jsonl", {"problem": "?", "answer": "1"})
    with pytest.raises(ValueError, match="in one folder, found them in main, socratic; name one"):
        load(tmp_path)


def test_broken_json_array_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"problem": "?"')
    with pytest.raises(ValueError, match=r"a.json: expected a JSON array"):
        load(tmp_path / "a.json")


def test_files_of_another_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"problem": "?", "answer": "1"}\n{"problem": "caf\xe9", "answer": "1"}\n'
    )
    with pytest.raises(ValueError, match=r"a\.jsonl:2: expected UTF-8"):
        load(tmp_path / "a.jsonl")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"a\.parquet: expected a parquet file"):
        load(tmp_path / "a.parquet")
    (tmp_path / "a.json").write_bytes(b'[{"problem": "caf\xe9"}]')
    with pytest.raises(ValueError, match=r"a\.json: expected a JSON array"):
        load(tmp_path / "a.json")


def test_empty_lines_are_skipped_but_counted_in_line_numbers(tmp_path: Path) -> None:
    rows = [json.dumps({"problem": text, "answer": "1"}) for text in ("first", "second")]
    (tmp_path / "a.jsonl").write_text("\ufeff\n" + "\n \n".join(rows) + "\n\n")
    loaded = load(tmp_path / "a.jsonl")
    assert [task.id for task in loaded.tasks] == ["a.jsonl:2", "a.jsonl:4"]
    assert loaded.skipped == {}


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache without network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def cached(cache: Path, repository: str) -> Path:
    """Create the folder of a repository in the layout of the cache."""
    (cache / repository / "refs").mkdir(parents=True)
    (cache / repository / "refs" / "main").write_text("c0ffee")
    snapshot = cache / repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    return snapshot


def test_cached_hub_data_set_is_loaded(hub_cache: Path) -> None:
    snapshot = cached(hub_cache, "datasets--openai--gsm8k")
    for folder in ("main", "socratic"):
        (snapshot / folder).mkdir()
        pq.write_table(
            pa.Table.from_pylist([{"question": folder, "answer": "#### 7"}]),
            snapshot / folder / "train-00000-of-00001.parquet",
        )
    assert texts(load_tasks(Hub(name="openai/gsm8k/main"), BARE)) == [("main", "7")]
    with pytest.raises(ValueError, match="found them in main, socratic"):
        load_tasks(Hub(name="openai/gsm8k"), BARE)


@pytest.mark.usefixtures("hub_cache")
def test_hub_errors_give_the_download_command() -> None:
    with pytest.raises(FileNotFoundError, match="`hf download --repo-type dataset openai/gsm8k`"):
        load_tasks(Hub(name="openai/gsm8k"), BARE)
    with pytest.raises(
        FileNotFoundError, match=r"`hf download deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B`"
    ):
        resolve_policy_folder("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")
    with pytest.raises(ValueError, match="name=gsm8k: expected a data set of the hub, owner/name"):
        load_tasks(Hub(name="gsm8k"), BARE)


def test_policy_folder_is_embedded_local_or_from_the_hub(hub_cache: Path, tmp_path: Path) -> None:
    local = tmp_path / "policy"
    local.mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        resolve_policy_folder(str(local))
    (local / "config.json").write_text("{}")
    assert resolve_policy_folder(str(local)) == local
    snapshot = cached(hub_cache, "models--owner--name")
    (snapshot / "config.json").write_text("{}")
    assert resolve_policy_folder("owner/name") == snapshot
    assert EMBEDDED.parts[-3:] == ("areal_jax", "models", "embedded")
    with pytest.raises(
        FileNotFoundError,
        match="expected 'embedded', 'embedded_vision', an existing folder, or a hub name",
    ):
        resolve_policy_folder("./no/such/folder")


@pytest.mark.parametrize("has_weights", [True, False])
def test_weights_are_downloaded_only_where_they_are_needed(
    has_weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked: list[str] = []

    def fetch(name: str, kind: str, patterns: Sequence[str]) -> Path:
        asked.extend(patterns)
        return tmp_path

    monkeypatch.setattr(policy_files, "fetch", fetch)
    assert resolve_policy_folder("owner/name", has_weights=has_weights) == tmp_path
    assert {"*.json", "*.jinja"} <= set(asked)
    assert ("*.safetensors" in asked) == has_weights


def test_generated_problems_become_tasks_on_access() -> None:
    source = Synthetic(num_tasks=50, families=("gcd", "linear"), seed=3)
    loaded = load_tasks(source, PromptConfig(suffix=" Box it."))
    problems = SyntheticProblems(50, "train", ("gcd", "linear"), "easy", 3)
    assert len(loaded.tasks) == 50
    assert loaded.tasks[7].prompt == (Message("user", problems[7].question + " Box it."),)
    assert (loaded.tasks[7].id, loaded.tasks[7].answer) == (problems[7].id, str(problems[7].answer))
    assert [task.family for task in loaded.tasks[:4]] == ["gcd", "linear", "gcd", "linear"]
    assert loaded.tasks[-1] == loaded.tasks[49]


def test_a_missing_reasoning_gym_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r'pip install "areal-jax\[reasoning-gym\]"'):
        load_tasks(ReasoningGym(names=("gcd",)), PromptConfig())
