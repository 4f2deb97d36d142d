"""A preflight passes every experiment here, and refuses those whose rewards, tools or groups are
broken."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from swe_rows import FILES, diff, make_row

from areal_jax.cli.train import main
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import experiment_names, load_experiment
from areal_jax.data.code_tasks import Stdin, format_tests
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.references import ReferenceAnswer
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.errors import ConfigError
from areal_jax.records import Message, Task
from areal_jax.rewards.exploits import LIMITS, PROGRAMS
from areal_jax.run.preflight import PreflightReport, find_tokenizer_folder, run_preflight
from areal_jax.run.preflight_findings import Row
from areal_jax.run.scripted_policy import Script, ScriptedPolicy, write_scripts

TOKENIZER = HFTokenizer.from_folder(EMBEDDED)

GSM8K = [
    {"question": "What is 30 + 42?", "answer": "30 + 42 = 72\n#### 72"},
    {"question": "What is 1 + 2?", "answer": "#### 3"},
    {"question": "What is half of one?", "answer": "#### \\frac{1}{2}"},
]

HUMAN_EVAL = {
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(3) == 6\n",
    "entry_point": "double",
}
APPS = {
    "question": "Read a number and print it twice.",
    "input_output": json.dumps({"inputs": ["1\n", "22\n"], "outputs": ["1 1\n", "22 22\n"]}),
    "solutions": json.dumps(["a = input()\nprint(a, a)\n"]),
}
LIVE = {
    "question_content": "Double the number.",
    "public_test_cases": '[{"input": "1\\n", "output": "2\\n"}]',
}


def run(name: str, *overrides: str) -> PreflightReport:
    return run_preflight(load_experiment(name, *overrides), name)


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def row_of(report: PreflightReport, script: str, kind: str = "math") -> Row:
    (row,) = (row for row in report.rows if (row.script, row.kind) == (script, kind))
    return row


def findings(report: PreflightReport) -> list[str]:
    return [str(finding) for finding in report.findings]


@pytest.fixture
def gsm8k(tmp_path: Path) -> list[str]:
    path = write_rows(tmp_path / "gsm8k.jsonl", GSM8K)
    return [f"tasks.path={path}", f"eval_tasks.path={path}"]


# What a script says.


def test_scripted_policy_truncates_within_the_answer() -> None:
    script = Script("truncated", ("\\boxed{123}",), False, is_cut=True)
    (completion,) = asyncio.run(ScriptedPolicy(script, TOKENIZER, 64)(np.zeros(3, np.int32), 1))
    assert (len(completion.tokens), completion.stop_reason) == (64, "length")
    said = TOKENIZER.decode(completion.tokens)
    assert "\\" in said and "123" not in said
    # Uniform over the vocabulary.
    assert completion.logp == pytest.approx(-math.log(TOKENIZER.vocab_size))


def test_scripted_policy_repeats_its_last_turn_and_stops() -> None:
    policy = ScriptedPolicy(Script("two", ("one", "two")), TOKENIZER, 4)
    said = [asyncio.run(policy(np.zeros(1, np.int32), 1))[0] for _ in range(3)]
    assert [TOKENIZER.decode(each.tokens) for each in said] == ["one", "two", "two"]
    assert {int(each.tokens[-1]) for each in said} == {TOKENIZER.stop_token_ids[0]}
    assert {each.stop_reason for each in said} == {"stop"}


def test_tool_calls_are_written_as_the_workflow_reads_them() -> None:
    experiment = load_experiment("tool_math", "workflow.call_format=Hermes")
    assert isinstance(experiment, Experiment)
    task = Task("one", (Message("user", "1+1?"),), "2")
    scripts = {each.name: each for each in write_scripts(experiment, task, ReferenceAnswer("2", "3"), "{boxed}")}  # fmt: skip
    call = (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*(3+4)"}}\n</tool_call>'
    )
    assert scripts["calls calculator"].turns == (call, "\\boxed{2}")
    assert scripts["wrong"].turns == ("\\boxed{3}",)


# What it finds.


@pytest.mark.slow
def test_rewards_and_advantages_of_scripts(gsm8k: list[str]) -> None:
    report = run("gsm8k", *gsm8k)
    assert findings(report) == []
    assert row_of(report, "reference").grades == {"correct": 3}
    assert row_of(report, "empty").grades == {"no_answer": 3}
    assert row_of(report, "truncated").grades == {"no_answer": 3}
    assert row_of(report, "wrong").rewards == [-5.0] * 3
    # Groups of the last two tasks: one sample of reward 5 and three of -5. Mean -2.5, standard
    # deviation sqrt((7.5² + 3 2.5²) / 3) = 5; so 7.5 / 5 = 1.5 and -2.5 / 5 = -0.5. The first task
    # has four exploits besides: mean -3.75, sqrt((8.75² + 7 1.25²) / 7) = 3.536, so 2.475.
    assert row_of(report, "reference").advantages == pytest.approx([2.475, 1.5, 1.5], abs=1e-3)
    assert row_of(report, "wrong").advantages == pytest.approx([-0.354, -0.5, -0.5], abs=1e-3)
    assert report.update is not None and report.update.grad_norm > 0


@pytest.mark.slow
def test_a_reward_for_everything_is_refused(
    tmp_path: Path, gsm8k: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text("def everything(task, answer):\n    return 1.0\n")
    setting = f"rewards.function={tmp_path}/own.py:everything"
    assert main(["--exp=gsm8k", "--preflight", *gsm8k, setting]) == 1
    shown = capsys.readouterr()
    for script in ("empty", "wrong", "truncated", "exploit: empty box"):
        assert f"finding: {script}, math: expected less than the reward of a right" in shown.out
    assert f"change the reward function, {setting}" in shown.out
    # Four wrong scripts and three more exploits, and the signal of groups.
    assert "preflight of gsm8k: 8 findings" in shown.err
    assert "correct 3" in shown.out


@pytest.mark.slow
def test_answers_without_a_verifier_are_refused(tmp_path: Path) -> None:
    # A field with a whole solution, of which the verifier would read the box alone.
    rows = [
        {"question": f"What is {n}?", "answer": n, "text": f"It is \\boxed{{{n}}}, as said."}
        for n in (1, 2)
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    settings = [f"tasks.path={path}", f"eval_tasks.path={path}"]
    fields = ["tasks.answer_field=text", "eval_tasks.answer_field=text"]
    assert findings(run("gsm8k", *settings)) == []
    found = findings(run("gsm8k", *settings, *fields))
    assert any(line.startswith("eval_tasks: expected graded answers") for line in found)
    (line,) = (line for line in found if line.startswith("reference, math"))
    assert "found -5 (wrong)" in line and "set tasks.answer_field=text to a field" in line


@pytest.mark.slow
def test_a_form_that_refuses_right_answers_is_refused(gsm8k: list[str]) -> None:
    assert findings(run("gsm8k", *gsm8k, "rewards.form=<think>.*</think>.*")) == []
    found = findings(run("gsm8k", *gsm8k, "rewards.form=<final>.*</final>"))
    assert found[0].startswith(
        "reference, math: expected the reward of a right answer, 5, found -5"
    )
    assert all(line.endswith("change rewards.form=<final>.*</final>") for line in found)


@pytest.mark.slow
def test_calls_in_another_format_are_refused() -> None:
    report = run("tool_math", "tasks.num_tasks=64")
    assert findings(report) == []
    assert row_of(report, "calls calculator").tools == {"calculator": 3}
    assert row_of(report, "right demonstration").tools == {"calculator": 3}
    report = run("tool_math", "tasks.num_tasks=64", "workflow.call_format=Hermes")
    assert row_of(report, "right demonstration").tools == {}
    line = findings(report)[0]
    assert line.startswith("tools, right demonstration, math: expected a call of calculator")
    assert line.endswith("workflow.call_format=Hermes does not read it; set it to Tags")


@pytest.mark.slow
def test_calls_that_decoding_leaves_out_are_refused(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, tmp_path / name)
    content = json.loads((EMBEDDED / "tokenizer.json").read_text())
    # As in the tokenizers of some policies, the tags of calls are special tokens.
    for number, tag in enumerate(("<tool_call>", "</tool_call>")):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        token = {"id": 768 + number, "content": tag, **flags, "special": True}
        content["added_tokens"].append(token)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((EMBEDDED / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 770}))
    settings = [
        f"policy.path={tmp_path}",
        "tasks=Synthetic",
        "tasks.num_tasks=64",
        "workflow.call_format=Hermes",
        "engine.max_prompt_tokens=256",
        "engine.max_new_tokens=96",
    ]
    report = run("tool_math", *settings)
    (line,) = findings(report)
    assert line.startswith("tools, calls calculator, math: expected a call of calculator to reach")
    assert "special tokens, which decoding leaves out" in line
    assert row_of(report, "reference").grades == {"correct": 8}


@pytest.mark.slow
def test_groups_without_signal_are_refused(gsm8k: list[str]) -> None:
    # 5 + 10 and -5 + 10 are both clipped to 1.
    report = run("gsm8k", *gsm8k, "trainer.shaping.bias=10", "trainer.shaping.clip=1")
    (line,) = findings(report)
    assert "rewards -5 ... 5 that all become 1; change trainer.shaping" in line
    assert report.update is not None and report.update.grad_norm == 0
    (line,) = findings(run("gsm8k", *gsm8k, "trainer.shaping.scale=-1"))
    assert "the opposite on 3 of 3 tasks" in line


@pytest.mark.slow
def test_a_distilled_policy_needs_no_rewards_that_differ() -> None:
    report = run("distill", "tasks.num_tasks=64", "trainer.shaping.scale=0")
    assert findings(report) == []
    assert report.update is not None and report.update.grad_norm > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["path=current", "hint=The answer is {answer}.", "distillation=JensenShannon"],
        ["path=initial", "hint=The answer is {answer}.", "distillation=SampledTokens"],
        ["path=embedded", "distillation=CrossTokenizer"],
    ],
)
def test_an_update_learns_from_each_kind_of_teacher(settings: list[str]) -> None:
    teacher = [f"trainer.teacher.{setting}" for setting in settings]
    report = run("distill", "tasks.num_tasks=64", *teacher)
    assert findings(report) == []
    assert report.update is not None and report.update.grad_norm > 0


@pytest.mark.slow
def test_partial_credit_below_the_reference_is_no_fault() -> None:
    report = run("own_reward", "tasks.num_tasks=64")
    assert findings(report) == []
    # Wrong by one in the last of three digits: two thirds of the way from -5 to 5.
    assert max(row_of(report, "wrong").rewards) == pytest.approx(-5 + 2 / 3 * 10)


@pytest.mark.slow
def test_raw_rewards_are_compared_by_order(tmp_path: Path, gsm8k: list[str]) -> None:
    (tmp_path / "own.py").write_text(
        "def score(task, answer):\n    return 7.5 if task.answer in answer else -len(answer)\n"
        "def constant(task, answer):\n    return 7.5\n"
    )
    raw = [*gsm8k, "rewards.scale=raw"]
    found = findings(run("gsm8k", *raw, f"rewards.function={tmp_path}/own.py:score"))
    # What names the right answer beside another one is worth as much.
    assert {line.partition(",")[0] for line in found} >= {"exploit: several answers in a box"}
    assert not any(line.startswith(("empty", "truncated", "reference")) for line in found)
    found = findings(run("gsm8k", *raw, f"rewards.function={tmp_path}/own.py:constant"))
    assert found[0].startswith("reference, math: expected the reward of a right answer")


@pytest.mark.slow
def test_an_answer_beyond_the_token_budget_is_refused(gsm8k: list[str]) -> None:
    found = findings(run("gsm8k", *gsm8k, "engine.max_new_tokens=4"))
    assert any("expected at most engine.max_new_tokens=4 tokens" in line for line in found)


@pytest.mark.slow
def test_a_reward_that_raises_is_refused(tmp_path: Path, gsm8k: list[str]) -> None:
    code = "def score(task, answer):\n    return float(answer.index('boxed') > 0)\n"
    (tmp_path / "own.py").write_text(code)
    found = findings(run("gsm8k", *gsm8k, f"rewards.function={tmp_path}/own.py:score"))
    assert any("empty, math: expected a reward, found GradingFailed" in line for line in found)


@pytest.mark.slow
def test_programs_with_solutions_are_tried_with_exploits(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "code.jsonl", [HUMAN_EVAL, APPS, LIVE])
    files = [f"{source}.path={path}" for source in ("tasks", "eval_tasks")]
    settings = ["tasks=Files", "eval_tasks=Files", *files, "policy.path=embedded"]
    report = run("code", *settings, "engine.max_prompt_tokens=512", "engine.max_new_tokens=256")
    assert findings(report) == []
    # LiveCodeBench has no solutions.
    assert row_of(report, "reference", "code").grades == {"correct": 2}
    assert row_of(report, "truncated", "code").grades == {"no_answer": 2}
    assert sum(row_of(report, "wrong", "code").grades.values()) == 3
    assert any(
        "1 of 3 tasks of kind code have no reference answer" in note for note in report.notes
    )
    exploits = [row for row in report.rows if row.script.startswith("exploit")]
    assert len(exploits) == len(PROGRAMS) + len(LIMITS) == 20
    assert {reward for row in exploits for reward in row.rewards} == {-5.0}
    assert row_of(report, "exploit: infinite loop", "code").grades == {"timeout": 1}


@pytest.mark.slow
def test_patches_of_repositories_are_applied_by_tools(tmp_path: Path) -> None:
    add = {"calc/new.py": "x = 1\n", "tests/test_ops.py": FILES["tests/test_ops.py"]}
    right = FILES | add | {"calc/ops.py": FILES["calc/ops.py"].replace("a - b", "a + b")}
    right.pop("calc/__init__.py")
    right["calc/__init__.py"] = FILES["calc/__init__.py"] + "from calc.new import x\n"
    useless = make_row(patch=diff(FILES, FILES | {"calc/ops.py": FILES["calc/ops.py"] + "\n"}))
    rows = write_rows(tmp_path / "rows.jsonl", [make_row(patch=diff(FILES, right)), useless])
    report = run(
        "gsm8k",
        f"tasks.path={rows}",
        f"eval_tasks.path={rows}",
        "workflow=CodingAgent",
        "workflow.call_format=Tags",
        "policy.path=embedded",
    )
    assert row_of(report, "empty", "code").grades == {"wrong": 2}
    assert row_of(report, "reference", "code").grades == {"correct": 1, "wrong": 1}
    assert row_of(report, "reference", "code").tools == {"edit": 4}
    assert all("rows.jsonl:2" in each for each in findings(report)), findings(report)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["edit", "shell"])
def test_generated_repositories_are_repaired_by_tools(tool: str) -> None:
    report = run(
        "gsm8k",
        *("tasks=Repositories", "eval_tasks=Repositories", "policy.path=embedded"),
        *("workflow=CodingAgent", "workflow.max_turns=3", "workflow.announce=false"),
        f"workflow.tools.names={tool}",
        *("engine.max_prompt_tokens=400", "engine.max_new_tokens=200"),
    )
    assert findings(report) == []
    assert row_of(report, "reference", "code").grades == {"correct": 3}
    assert row_of(report, "reference", "code").tools == {tool: 3}
    assert row_of(report, "empty", "code").grades == {"wrong": 3}


@pytest.mark.slow
def test_a_code_grader_that_trusts_exit_codes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import subprocess, sys\n"
        "def naive(task, answer):\n"
        "    program = answer.partition('```python')[2].partition('```')[0]\n"
        "    command = [sys.executable, '-c', program or '1/0']\n"
        "    done = subprocess.run(command, input='1', text=True, capture_output=True)\n"
        "    return done.returncode == 0\n"
    )
    path = write_rows(tmp_path / "code.jsonl", [APPS])
    settings = ["tasks=Files", f"tasks.path={path}", "evaluation.every_steps=0"]
    settings += ["policy.path=embedded", f"rewards.function={tmp_path}/own.py:naive"]
    settings += ["engine.max_prompt_tokens=256", "rewards.timeout_s=4"]
    report = run("code", *settings)
    rewarded = {finding.what for finding in report.findings}
    assert {"wrong, code", "exploit: exits with 0, code"} <= rewarded
    assert row_of(report, "exploit: exits with 0", "code").rewards == [5.0]
    assert row_of(report, "exploit: exits with the code of success", "code").rewards == [-5.0]
    assert row_of(report, "truncated", "code").rewards == [-5.0]


@pytest.mark.slow
def test_answers_are_tried_in_the_form_that_is_rewarded(tmp_path: Path, gsm8k: list[str]) -> None:
    (tmp_path / "own.py").write_text(
        "import re\n"
        "def verl(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    found = re.search('<answer>(.*?)</answer>', solution_str, re.DOTALL)\n"
        "    return float(bool(found) and found[1].strip() == ground_truth)\n"
    )
    report = run("gsm8k", *gsm8k, f"rewards.function={tmp_path}/own.py:verl")
    assert findings(report) == []
    assert (
        "answers of kind math are rewarded in the form '<answer>{plain}</answer>'" in report.notes
    )
    assert row_of(report, "reference").rewards == [5.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model"])
def test_examples_are_packed_and_learned(name: str) -> None:
    report = run(name, "examples.num_tasks=64")
    assert findings(report) == []
    for row in report.examples:
        assert 0 < row.num_loss_tokens < row.num_tokens
        assert 0 < row.num_ended <= row.num_examples == 32
    assert report.update is not None and 0 < report.update.grad_norm < math.inf


# Which policy it reads.


def test_command_for_a_missing_policy_names_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, (note,) = find_tokenizer_folder(load_experiment("countdown"), "countdown")
    assert folder == EMBEDDED
    assert "--exp=tiny_tools_sft examples.families=countdown --run-folder=runs/tiny_tools" in note
    made = Path("runs/tiny_tools/policy")
    shutil.copytree(EMBEDDED, made)
    assert find_tokenizer_folder(load_experiment("countdown"), "countdown") == (made, ())


def test_missing_policy_is_refused(tmp_path: Path) -> None:
    experiment = load_experiment("countdown", f"policy.path={tmp_path}/none")
    with pytest.raises(ConfigError, match=r"policy\.path=.*none: .*--preflight reads config\.json"):
        find_tokenizer_folder(experiment, "countdown")


@pytest.mark.slow
@pytest.mark.parametrize("name", experiment_names())
def test_every_experiment_passes(name: str, gsm8k: list[str]) -> None:
    settings: list[str] = []
    if name in ("gsm8k", "aime_1p5b"):
        settings = gsm8k
    if name == "aime_1p5b":
        # Policy and data are on a hub.
        settings = ["policy.path=embedded", "tasks=Files", "eval_tasks=Files", *gsm8k]
    if name == "rlhf_tiny":
        settings = ["rewards.model=none"]  # another run writes it
    report = run(name, *settings)
    assert findings(report) == []
    scripts = {row.script for row in report.rows}
    assert report.update is not None
    if name in ("safe", "nim"):  # right actions are the environment's to know
        assert {"wrong", "empty", "truncated"} & scripts
        # Players of one game have other turns each, and so other advantages.
        assert name == "nim" or report.update.grad_norm == 0.0
        return
    # The calls that repair a repository come before what would be truncated.
    expected = {"reference", "wrong", "empty", *(("truncated",) if name != "coding_agent" else ())}
    assert not scripts or expected <= scripts
    assert 0 < report.update.grad_norm < math.inf


def test_code_exploits_are_written_for_scripts() -> None:
    experiment = load_experiment("code")
    assert isinstance(experiment, Experiment)
    task = Task("one", (), format_tests(Stdin([("1\n", "2\n")])), "code")
    scripts = list(write_scripts(experiment, task, None, "{boxed}"))
    assert [script.name for script in scripts] == ["empty", "wrong"]
    assert "print(answer(open(0).read()))" in scripts[1].turns[0]
