"""Claude Code against the server: it mends a file by a call of its shell, and says so.

    python benchmarks/clients/claude_code.py CLAUDE

CLAUDE is the program, such as `claude_agent_sdk/_bundled/claude` in an environment with
`claude-agent-sdk`. The server is the project's, with the tokenizer of the embedded policy and a
chat template with tools; what the policy would say is scripted, because no tiny policy answers
prompts of 30 000 tokens. Prints the program's result and the tokens of each prompt, and fails if
the file is not mended.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.records import Completion, Progress, Request, Sampling
from areal_jax.serve.app import App, listening
from areal_jax.serve.config import LimitsConfig
from areal_jax.serve.engine_backend import EngineBackend

KEY, TASK = "key", "TASK: mend add.py"
CALL = {
    "name": "Bash",
    "arguments": {
        "command": "sed -i 's/ - / + /' add.py && python3 -c 'import add; print(add.add(2, 3))'",
        "description": "mend and try",
    },
}
TEMPLATE = """\
{% if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class ScriptedEngine:
    """Calls the shell if it is given the task, and ends when it has seen the call's output."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self.tokenizer = tokenizer
        self.prompt_tokens = list[int]()

    async def submit(self, request: Request) -> list[Completion]:
        self.prompt_tokens.append(len(request.prompt_tokens))
        _, _, after = self.tokenizer.decode(request.prompt_tokens).partition(TASK)
        text = f"I look.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
        if "</tool_call>" in after:
            text = "It is mended."
        tokens = np.append(self.tokenizer.encode(text), self.tokenizer.stop_token_ids[0])
        logp, versions = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
        answer = Completion(tokens.astype(np.int32), logp, versions, "stop")
        if request.on_progress is not None:
            list(request.on_progress([Progress(0, answer)]))
        return [answer]

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        return {}


async def main(program: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        policy, work = Path(temporary, "policy"), Path(temporary, "work")
        work.mkdir()
        (work / "add.py").write_text("def add(a, b):\n    return a - b\n")
        policy.mkdir()
        for name in ("tokenizer.json", "config.json", "tokenizer_config.json"):
            shutil.copy(EMBEDDED / name, policy)
        (policy / "chat_template.jinja").write_text(TEMPLATE)
        tokenizer = HFTokenizer.from_folder(policy)
        engine = ScriptedEngine(tokenizer)
        sampling = Sampling(4096, stop_token_ids=tokenizer.stop_token_ids)
        app = App(EngineBackend(engine, "scripted", tokenizer, sampling, 0, KEY), LimitsConfig())
        async with listening(app, "127.0.0.1", 0, 5.0) as port:
            variables = {
                "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}",
                "ANTHROPIC_API_KEY": KEY,
                "ANTHROPIC_MODEL": "scripted",
                "ANTHROPIC_SMALL_FAST_MODEL": "scripted",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "HOME": temporary,
            }
            command = [program, "-p", TASK, "--allowedTools", "Bash", "--output-format", "json"]
            process = await asyncio.create_subprocess_exec(
                *command, cwd=work, env=os.environ | variables, stdout=asyncio.subprocess.PIPE
            )
            out, _ = await asyncio.wait_for(process.communicate(), 180)
        result = json.loads(out.splitlines()[-1])
        mended = (work / "add.py").read_text()
    shown = {name: result[name] for name in ("subtype", "num_turns", "result")}
    print(json.dumps({**shown, "prompt_tokens": engine.prompt_tokens}))
    assert process.returncode == 0 and "a + b" in mended, (process.returncode, mended)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
