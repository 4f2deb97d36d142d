"""One official client against a running server: plain, streamed, with formats and tools.

    python benchmarks/clients/chat.py CLIENT BASE_URL API_KEY

CLIENT is litellm, instructor, openai_agents, langchain, inspect_ai or lm_eval, which alone is
needed. Prints a line of JSON for each thing that was tried, and fails on the first that is not as
expected.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

MODEL = "embedded"
QUESTION = "What is 12 + 30?"
SCHEMA = {
    "type": "object",
    "properties": {"total": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["total"],
    "additionalProperties": False,
}


def report(client: str, what: str, found: Any) -> None:
    version = importlib.metadata.version(client)
    print(json.dumps({"client": client, "version": version, "what": what, "found": str(found)}))


def litellm(url: str, key: str) -> None:
    import litellm

    how: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": url, "api_key": key, "seed": 1}
    how["messages"] = [{"role": "user", "content": QUESTION}]
    plain = litellm.completion(**how, max_tokens=48).choices[0].message.content
    assert plain
    report("litellm", "chat", plain)
    parts = [
        part.choices[0].delta.content or ""
        for part in litellm.completion(**how, max_tokens=48, stream=True)
    ]
    assert "".join(parts) == plain and len(parts) > 2
    report("litellm", "chat, streamed: the same text", len(parts))
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    found = litellm.completion(**how, max_tokens=48, response_format=form)
    assert json.loads(found.choices[0].message.content).keys() == {"total"}
    report("litellm", "response_format", found.choices[0].message.content)
    responses = litellm.responses(
        model=how["model"], input=QUESTION, api_base=url, api_key=key, max_output_tokens=48
    )
    assert responses.output[0].content[0].text
    report("litellm", "responses", responses.output[0].content[0].text)


def instructor(url: str, key: str) -> None:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel, Field

    class Answer(BaseModel):
        total: int = Field(ge=0, le=999)

    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 48,
    }
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(OpenAI(base_url=url, api_key=key), mode=mode)
        found = client.chat.completions.create(response_model=Answer, max_retries=0, **asked)
        report("instructor", f"{mode}", found)
        *_, last = client.chat.completions.create_partial(
            response_model=Answer, max_retries=0, **asked
        )
        assert 0 <= last.total <= 999
        report("instructor", f"{mode}, streamed", last)


def openai_agents(url: str, key: str) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client, called = AsyncOpenAI(base_url=url, api_key=key), list[int]()

    @agents.function_tool
    def keep(total: int) -> str:
        """Keep a number."""
        called.append(total)
        return "kept"

    async def main() -> None:
        for model in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
            agent = agents.Agent(
                "calculator",
                model=model(MODEL, client),
                tools=[keep],
                tool_use_behavior="stop_on_first_tool",
                model_settings=agents.ModelSettings(tool_choice="required", max_tokens=64),
            )
            name = model.__name__
            found = await agents.Runner.run(agent, QUESTION)
            assert found.final_output == "kept"
            report("openai-agents", f"{name}, a required tool", called[-1])
            streamed = agents.Runner.run_streamed(agent, QUESTION)
            events = [each.type async for each in streamed.stream_events()]
            assert streamed.final_output == "kept"
            report("openai-agents", f"{name}, a required tool, streamed", len(events))

    asyncio.run(main())


def langchain(url: str, key: str) -> None:
    from langchain_openai import ChatOpenAI

    for responses in (False, True):
        model = ChatOpenAI(
            model=MODEL, base_url=url, api_key=key, max_tokens=48, use_responses_api=responses
        )
        api = "responses" if responses else "chat"
        plain = model.invoke(QUESTION)
        assert plain.text
        report("langchain-openai", api, plain.text)
        parts = [each.text for each in model.stream(QUESTION)]
        assert "".join(parts)
        report("langchain-openai", f"{api}, streamed", len(parts))
        form = {"title": "answer", "description": "An answer.", **SCHEMA}
        found = model.with_structured_output(form, method="json_schema").invoke(QUESTION)
        assert found.keys() == {"total"}
        report("langchain-openai", f"{api}, structured output", found)


def inspect_ai(url: str, key: str) -> None:
    import inspect_ai
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import includes

    task = inspect_ai.Task([Sample(QUESTION, target="42"), Sample("What is 1 + 1?", target="2")])
    task.scorer = [includes()]
    with tempfile.TemporaryDirectory() as folder:
        (log,) = inspect_ai.eval(
            task,
            model=f"openai-api/local/{MODEL}",
            model_base_url=url,
            model_args={"api_key": key},
            max_tokens=48,
            display="none",
            log_dir=folder,
        )
    assert log.status == "success" and log.results is not None, log.error
    report("inspect-ai", "eval", [(each.name, each.metrics) for each in log.results.scores])


def lm_eval(url: str, key: str) -> None:
    import os

    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion

    os.environ["OPENAI_API_KEY"] = key
    model = LocalChatCompletion(model=MODEL, base_url=f"{url}/chat/completions", num_concurrent=2)
    how = {"until": ["\n"], "max_gen_toks": 48, "do_sample": False}
    prompts = [
        model.apply_chat_template([{"role": "user", "content": text}])
        for text in (QUESTION, "What is 1 + 1?")
    ]
    asked = [
        Instance("generate_until", {}, (prompt, how), at) for at, prompt in enumerate(prompts * 2)
    ]
    found = model.generate_until(asked)
    assert all(found) and found[:2] == found[2:] and not any("\n" in text for text in found)
    report("lm-eval", "generate_until, the same text twice", found[:2])


CLIENTS: dict[str, Callable[[str, str], None]] = {
    each.__name__: each
    for each in (litellm, instructor, openai_agents, langchain, inspect_ai, lm_eval)
}

if __name__ == "__main__":
    CLIENTS[sys.argv[1]](*sys.argv[2:])
