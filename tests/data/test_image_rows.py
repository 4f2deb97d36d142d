"""Rows with images: how they are read, rendered, and stored."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from areal_jax.data.config import Files, PromptConfig, RemoteImagesConfig
from areal_jax.data.sources import TaskSet, load_tasks
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.records import Message, Task, task_from_json, task_to_json

# As in the templates of Qwen2.5-VL and Qwen3-VL.
TEMPLATE = (
    "{% for m in messages %}<start>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<pad>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}<end>{% endfor %}"
)
WORDS = ["<start>", "<end>", "<pad>", "[UNK]", "Count", "the", "squares", "and", "dots"]


def make_tokenizer(template: str | None = TEMPLATE) -> HFTokenizer:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(WORDS[:3])
    return HFTokenizer(words, template, {}, [1])


def read(folder: Path, *rows: dict[str, object]) -> list[Task]:
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = load_tasks(Files(path=str(folder / "train.jsonl")), PromptConfig(suffix=" now"))
    assert not found.skipped
    return list(found.tasks)


def test_images_of_a_row_are_files_beside_it_or_data_uris(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"first")
    uri = "data:image/png;base64," + base64.b64encode(b"second").decode()
    one, two, none = read(
        tmp_path,
        {"prompt": "Count the dots", "answer": "1", "image": "a.png"},
        {"prompt": "<image> and <image>", "answer": "2", "images": ["a.png", uri]},
        {"prompt": "Count", "answer": "3", "image": None},
    )
    assert one.prompt == (Message("user", "Count the dots now", (b"first",)),)
    assert two.images == (b"first", b"second")
    assert none.images == ()


def test_rows_of_geometry3k_are_read(tmp_path: Path) -> None:
    """As the hub has them: parquet with lists of images, each with bytes and a path."""
    images = [[{"bytes": b"first", "path": None}], [{"bytes": b"a", "path": "a.png"}] * 2]
    table = {
        "images": images,
        "problem": ["<image>Find x.", "Is <image> similar to <image>?"],
        "answer": ["\\frac { 3 } { 2 }", "4.0"],
    }
    pq.write_table(pa.table(table), tmp_path / "train-00000-of-00001.parquet")
    found = load_tasks(Files(path=str(tmp_path)), PromptConfig())
    assert not found.skipped
    first, second = found.tasks
    assert first.prompt == (Message("user", "<image>Find x.", (b"first",)),)
    assert (first.kind, first.answer) == ("math", "\\frac { 3 } { 2 }")
    assert second.images == (b"a", b"a")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "<image> <image>", "image": "a.png"}, "1 images for 2 <image>"),
        ({"prompt": "Count", "image": "b.png"}, "an image that cannot be read"),
        ({"prompt": "Count", "image": "https://example.com/a.png"}, "an image that cannot be read"),
    ],
)
def test_rows_with_unusable_images_are_skipped(
    tmp_path: Path, row: dict[str, object], reason: str
) -> None:
    (tmp_path / "a.png").write_bytes(b"first")
    rows = [row | {"answer": "1"}, {"prompt": "Count", "answer": "1"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = load_tasks(Files(path=str(tmp_path / "train.jsonl")), PromptConfig())
    assert len(found.tasks) == 1
    (skipped,) = found.skipped
    assert skipped.startswith(reason)


class Images(BaseHTTPRequestHandler):
    """A server of two images, and of failures."""

    def do_GET(self) -> None:
        status = 503 if self.path == "/busy" else 404 if self.path == "/missing" else 200
        self.send_response(status)
        content = self.path.encode() * (40 if self.path == "/large" else 1)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def image_host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Images)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def from_host(folder: Path, host: str, *paths: str, allowed: bool = True) -> TaskSet:
    (folder / "a.png").write_bytes(b"first")
    rows = [
        {"prompt": "<image> <image>", "answer": "1", "images": [f"HTTP://{host}{path}", "a.png"]}
        for path in paths
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    images = RemoteImagesConfig(hosts=(host,) if allowed else (), max_bytes=100)
    return load_tasks(Files(path=str(folder / "train.jsonl"), images=images), PromptConfig())


def test_images_of_allowed_hosts_are_fetched(tmp_path: Path, image_host: str) -> None:
    found = from_host(tmp_path, image_host, "/one", "/missing", "/large", "/two")
    assert [task.images for task in found.tasks] == [(b"/one", b"first"), (b"/two", b"first")]
    missing, large = found.skipped
    assert missing.endswith("expected status 200, found 404")
    assert large.endswith("expected an image of at most images.max_bytes=100 bytes")


def test_images_of_other_hosts_are_not_fetched(tmp_path: Path, image_host: str) -> None:
    with pytest.raises(ValueError, match=r"of a host in images\.hosts \(none\)"):
        from_host(tmp_path, image_host, "/one", allowed=False)


def test_a_host_that_fails_ends_the_start(tmp_path: Path, image_host: str) -> None:
    # Each other row would wait for it, too.
    with pytest.raises(ValueError, match="expected status 200, found 503"):
        from_host(tmp_path, image_host, "/one", "/busy")


def test_an_image_is_rendered_as_its_tokens() -> None:
    tokenizer = make_tokenizer()
    tokenizer.read_images(2, len)
    placed = tokenizer.render([Message("user", "Count <image> and <image> dots", (b"xx", b"x"))])
    # start, Count, two tokens, and, one token, dots, end.
    assert placed.tolist() == [0, 4, 2, 2, 7, 2, 8, 1]
    before = tokenizer.render([Message("user", "Count", (b"xxx",))])
    assert before.tolist() == [0, 2, 2, 2, 4, 1]
    answer = tokenizer.render_answer([Message("user", "Count", (b"xxx",))], "dots")
    np.testing.assert_array_equal(
        answer, tokenizer.render_answer([Message("user", "Count")], "dots")
    )


def test_images_that_cannot_be_rendered_are_refused() -> None:
    message = Message("user", "Count", (b"x",))
    for template in (TEMPLATE, None):
        with pytest.raises(ValueError, match="expected a conversation without images"):
            make_tokenizer(template).render([message])
    tokenizer = make_tokenizer("{{ messages[0].content | string | length }}")
    tokenizer.read_images(2, len)
    with pytest.raises(ValueError, match="renders 1 images as <pad>, found 0"):
        tokenizer.render([message])
    with pytest.raises(ValueError, match="expected a chat template that renders 1 images"):
        with_images = make_tokenizer()
        with_images.read_images(2, len)
        with_images.render([Message("user", "Count <pad>", (b"x",))])
    with pytest.raises(ValueError, match="in the first prompt alone"):
        tokenizer.render_next([message])


def test_tasks_with_images_survive_json() -> None:
    task = Task("1", (Message("user", "Count", (b"\x00\xff",)), Message("user", "dots")), "2")
    fields = json.loads(json.dumps(task_to_json(task)))
    assert task_from_json(fields) == task
    assert [*fields["prompt"][1]] == ["role", "content"]
