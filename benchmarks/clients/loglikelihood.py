"""Log-likelihoods of lm-eval over the server, against those of transformers.

    python loglikelihood.py served http://127.0.0.1:8000/v1 secret > served.json
    python loglikelihood.py expected areal_jax/models/embedded > expected.json
    python loglikelihood.py compare served.json expected.json

The first needs lm-eval[api], the second transformers with torch.

Requests are token ids, as `tokenizer_backend=remote` sends them. Prints the largest difference of a
continuation's log-likelihood, and whether all greedy flags agree.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAIRS = [
    ("What is 12 + 30?", " 42"),
    ("What is 12 + 30?", " 17"),
    ("Find the remainder of 17 divided by 5.", " 2"),
    ("A triangle has sides 3, 4 and 5. What is its area?", " 6"),
    ("A", "B"),
    ("The number of letters", " in a word that is long"),
]


def served(url: str, key: str) -> list[Any]:
    import os

    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    os.environ["OPENAI_API_KEY"] = key
    model = LocalCompletionsAPI(
        model="embedded",
        base_url=f"{url}/completions",
        tokenizer_backend="remote",
        auth_token=key,
        num_concurrent=1,
        max_length=512,
    )
    asked = [Instance("loglikelihood", {}, pair, at) for at, pair in enumerate(PAIRS)]
    return [[float(logp), bool(greedy)] for logp, greedy in model.loglikelihood(asked)]


def expected(folder: str) -> list[Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for context, continuation in PAIRS:
        whole = tokenizer.encode(context + continuation, add_special_tokens=False)
        begin = len(tokenizer.encode(context, add_special_tokens=False))
        with torch.no_grad():
            logp = torch.log_softmax(model(torch.tensor([whole])).logits[0, :-1], -1)[begin - 1 :]
        tokens = torch.tensor(whole[begin:])
        total = logp.gather(1, tokens[:, None]).sum().item()
        found.append([total, bool((logp.argmax(-1) == tokens).all())])
    return found


def compare(one: str, other: str) -> str:
    rows = [json.loads(Path(each).read_text()) for each in (one, other)]
    largest = max(abs(a[0] - b[0]) for a, b in zip(*rows, strict=True))
    agree = all(a[1] == b[1] for a, b in zip(*rows, strict=True))
    assert largest < 1e-3 and agree, rows
    return f"{len(rows[0])} pairs, largest difference {largest:.1e}, greedy flags agree: {agree}"


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    print(
        json.dumps(
            {"served": served, "expected": expected, "compare": compare}[command](*arguments)
        )
    )
