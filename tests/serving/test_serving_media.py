"""Pictures of requests: nothing is read but what the request holds, and what hosts have that the server may ask."""

from __future__ import annotations

import base64
import contextlib
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from fastapi import HTTPException
from PIL import Image
from servers import BATCHES, PROMPTS, plain, serving, target, until
from transformers import (
    AutoTokenizer,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from transformers.models.clip import CLIPImageProcessor

from hf_spec.serving import media
from hf_spec.serving.media import bring_media
from hf_spec.serving.policy import Policy


def picture(width: int = 4, height: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "png")
    return file.getvalue()


class Host(BaseHTTPRequestHandler):
    """Answer with a picture, with what leads to it, or with too much of it; note who asks."""

    asked: ClassVar[list[str]] = []
    goes_on: ClassVar[threading.Event]  # when slow answers come

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/slow/"):
            assert self.goes_on.wait(120)
            self.path = "/picture.png"
        moved = self.path == "/moved"
        self.send_response(302 if moved else 404 if self.path == "/none" else 200)
        if moved:
            self.send_header("Location", "/picture.png")
        self.end_headers()
        self.wfile.write(picture() if self.path == "/picture.png" else b"x" * (3 << 19))

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def host() -> Iterator[str]:
    Host.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def chat(url: Any, kind: str = "image_url") -> dict[str, Any]:
    holder = "image_url" if kind == "input_image" else kind
    return {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": kind, holder: url}]}]
    }


def brought(body: dict[str, Any], **policy: Any) -> Any:
    bring_media(body, Policy(**policy))
    part = body["messages"][0]["content"][1]
    return part[part["type"] if part["type"] != "input_image" else "image_url"]


DATA = "data:image/png;base64," + base64.b64encode(picture()).decode()
HELD = {"url": "data:image/;base64," + base64.b64encode(picture()).decode()}


def test_what_the_request_holds_is_taken():
    for url in (DATA, {"url": DATA}, DATA.partition(",")[2]):
        assert brought(chat(url)) == brought(chat(url, "input_image")) == HELD
    sound = base64.b64encode(b"RIFF").decode()
    for given in (sound, {"data": sound, "format": "wav"}, f"data:audio/wav;base64,{sound}"):
        assert brought(chat(given, "input_audio")) == f"data:audio/;base64,{sound}"
    body = {"assets": {"<img>": {"data_base64": DATA}}}
    bring_media(body, Policy())
    assert body["assets"]["<img>"]["data_base64"] == HELD["url"]


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "audio_url"])
def test_nothing_else_is_read(kind, host, tmp_path, monkeypatch):
    """No host, no file, by no spelling; also a file whose name is base64."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "abcd"
    file.write_bytes(picture())
    urls = (
        f"http://{host}/picture.png",
        f"HTTP://{host}/picture.png",
        str(file),
        file.as_uri(),
        "../abcd",
        "ftp://a/b",
    )
    for url in (
        *urls,
        f" http://{host}/",
        "",
        None,
        3,
        [DATA],
        {"url": {"url": DATA}},
        {},
        "data:,x",
        "data:text/x;base64,",
    ):
        for given in (url, {"url": url}):
            with pytest.raises(HTTPException) as caught:
                brought(chat(given, kind))
            assert caught.value.status_code == 400
    assert Host.asked == []
    if "image" in kind:
        with pytest.raises(HTTPException, match="no picture"):
            brought(chat("abcd", kind))


@pytest.mark.parametrize("where", ["content", "flat", "output", "assets"])
def test_wherever_a_url_stands_it_is_looked_at(where, host):
    part = {"type": "input_image", "image_url": f"http://{host}/picture.png"}
    bodies = {
        "content": {"input": [{"role": "user", "content": [part]}]},
        "flat": {"input": [part]},
        "output": {"input": [{"type": "function_call_output", "output": [part]}]},
        "assets": {"assets": {"a": {"data_base64": part["image_url"]}}},
    }
    with pytest.raises(HTTPException):
        bring_media(bodies[where], Policy())
    assert Host.asked == []


def test_hosts_that_are_allowed_are_asked(host):
    url = f"http://{host}/picture.png"
    assert brought(chat(url), media_hosts=("a.example", host)) == HELD
    assert Host.asked == ["/picture.png"]


@pytest.mark.parametrize(
    "spelled",
    [
        "http://{host}@b.example/picture.png",
        "http://user@{host}/picture.png",
        "http://b.example\\@{host}/picture.png",
        "http://b.example:80#@{host}/",
        "http://{name}/picture.png",
        "https://{host}.b.example/",
        "http://{host}/ x",
        "http://[::1/",
        "http://{name}:99999/",
    ],
)
def test_other_hosts_are_not_asked(spelled, host):
    url = spelled.format(host=host, name=host.partition(":")[0])
    with pytest.raises(HTTPException, match="--media-hosts"):
        brought(chat(url), media_hosts=(host,))
    assert Host.asked == []


def test_the_usual_port_is_meant_where_none_is_named(host):
    name = host.partition(":")[0]
    with pytest.raises(HTTPException, match="--media-hosts"):
        brought(chat(f"http://{host}/picture.png"), media_hosts=(name,))
    assert Host.asked == []


@pytest.mark.parametrize(("path", "told"), [("moved", "302"), ("none", "404"), ("large", "larger than 1 MiB")])
def test_no_redirect_is_followed_and_no_large_file_read(path, told, host):
    with pytest.raises(HTTPException, match=told):
        brought(chat(f"http://{host}/{path}"), media_hosts=(host,), max_request_mib=1)
    assert Host.asked == [f"/{path}"]


def test_videos_are_refused(host):
    with pytest.raises(HTTPException, match="videos"):
        brought(chat({"url": f"http://{host}/"}, "video_url"), media_hosts=(host,))
    assert Host.asked == []


def test_pictures_are_small_in_all():
    large = "data:image/png;base64," + base64.b64encode(picture(6_000, 6_000)).decode()
    brought(chat(large))
    body = chat(large)
    body["messages"][0]["content"].append({"type": "image_url", "image_url": large})
    with pytest.raises(HTTPException, match="pixels"):
        bring_media(body, Policy())


def test_pictures_and_sounds_are_small_in_all():
    sound = {"type": "input_audio", "input_audio": base64.b64encode(bytes(600 << 10)).decode()}
    for count in (1, 2):
        body = {"messages": [{"role": "user", "content": [dict(sound) for _ in range(count)]}]}
        with pytest.raises(HTTPException, match="1 MiB in all") if count == 2 else contextlib.nullcontext():
            bring_media(body, Policy(max_request_mib=1))


def test_all_that_is_fetched_has_one_deadline(host, monkeypatch):
    body = chat(f"http://{host}/picture.png")
    monkeypatch.setattr(media, "SECONDS", -1)
    with pytest.raises(HTTPException, match="of a request take more than"):
        bring_media(body, Policy(media_hosts=(host,)))
    assert Host.asked == []


def test_a_slow_host_delays_no_other_request(host, monkeypatch):
    monkeypatch.setattr(media, "SECONDS", 60)
    monkeypatch.setattr(Host, "goes_on", threading.Event(), raising=False)
    with serving("ngram", media_hosts=(host,)) as client, ThreadPoolExecutor(3) as pool:
        slow = [
            pool.submit(client.post, "v1/chat/completions", chat(f"http://{host}/slow/{number}"))
            for number in range(3)
        ]
        until(lambda: len(Host.asked) == 3)
        assert client.complete(PROMPTS[0], 5) == plain(PROMPTS[0], 5)
        assert not any(one.done() for one in slow)
        Host.goes_on.set()
        assert {one.result()[0] for one in slow} == {200}


def test_a_server_refuses_them_by_name(host):
    """Also one whose target takes no pictures, and would pass them over."""
    with serving("ngram") as client:
        for path, body in {
            "chat/completions": chat(f"http://{host}/"),
            "responses": {"input": chat("/x")["messages"]},
        }.items():
            status, answer = client.post(f"v1/{path}", body)
            assert status == 400 and answer["error"]["message"].startswith("image_url: ")
        asked = {
            "state": "a",
            "questions": {"q": {"type": "noul"}},
            "assets": {"a": {"data_base64": f"http://{host}/"}},
        }
        assert client.post("v1/systemone", asked)[0] == 400
    assert Host.asked == []


def test_a_target_that_sees_gets_what_the_request_holds(tmp_path, seeded):
    tokenizer = AutoTokenizer.from_pretrained(target()[1].name_or_path)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    text = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                       num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                              image_size=8, patch_size=4)  # fmt: skip
    image_token = tokenizer.convert_tokens_to_ids("<image>")
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=image_token)
    )
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    images = CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    template = (
        "{% for m in messages %}{% for c in m.content %}"
        "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    LlavaProcessor(images, tokenizer, patch_size=4, vision_feature_select_strategy="default",
                   chat_template=template, num_additional_image_tokens=1).save_pretrained(tmp_path)  # fmt: skip
    with serving("ngram", target=str(tmp_path)) as client:
        body = {**chat(DATA), "max_tokens": 5, "temperature": 0}
        status, answer = client.post("v1/chat/completions", body)
        assert status == 200 and answer["usage"]["prompt_tokens"] > 4, answer
        said = answer["choices"][0]["message"]["content"]
        for stop, ends in ((said[:1], True), ("no such text", False)):
            stopped = client.post("v1/chat/completions", {**body, "stop": stop})[1]["choices"][0]["message"]["content"]
            assert said.startswith(stopped) and (len(stopped) < len(said)) == ends and stopped
        assert client.post("v1/chat/completions", {**body, **chat("data:image/png;base64,AAAA")})[0] == 400
        assert client.post("v1/chat/completions", {**body, **chat(str(tmp_path / "x.png"))})[0] == 400
    told = "reads pictures or sounds, .*start it without --continuous-batching"
    with pytest.raises(ValueError, match=told), serving("ngram", target=str(tmp_path), **BATCHES):
        pass
