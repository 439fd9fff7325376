"""Who may ask a server, for what, and how much: keys, closed endpoints, sizes, addresses."""

from __future__ import annotations

import http.client
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import fields

import pytest
from servers import TARGET, Client, serving

from hf_spec.cli import main
from hf_spec.serving.policy import Policy, check_address, is_host

KEY = "a-key.of_9"


def status(client: Client, path: str, method: str = "GET", data: bytes | None = None, **headers: str) -> int:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"{client.url}/{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@pytest.fixture(scope="module")
def locked() -> Iterator[Client]:
    with serving("ngram", api_key=KEY, admin=True, docs=True, enable_cors=True, max_request_mib=1) as client:
        yield client


def test_what_nobody_asked_for_is_closed():
    """A server that is not asked for them answers none of them, whatever the method; one that is asked, all."""
    with serving("ngram") as client:
        for path in ("docs", "redoc", "openapi.json", "docs/oauth2-redirect", "reset", "load_model"):
            for method, body in (("GET", None), ("POST", b"{}")):
                assert status(client, path, method, body) == 404, path


def test_what_is_asked_for_is_open(locked):
    key = {"Authorization": f"Bearer {KEY}"}
    assert [status(locked, path, **key) for path in ("docs", "redoc", "openapi.json")] == [200] * 3
    assert locked.post("load_model", {"model": "another"}, **key)[0] == 400


@pytest.mark.parametrize("path", ["v1/models", "metrics", "docs", "v1/nowhere"])
@pytest.mark.parametrize(
    "given",
    [None, "", KEY, f"Basic {KEY}", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer \xff"],
)
def test_nobody_enters_without_the_key(locked, path, given):
    assert status(locked, path, **({} if given is None else {"Authorization": given})) == 401


def test_the_key_opens_everything(locked):
    for scheme in ("Bearer", "bearer"):
        assert status(locked, "v1/models", Authorization=f"{scheme} {KEY}") == 200
    found, told = locked.post("v1/completions", {"prompt": "Hi"})
    assert found == 401 and "Authorization: Bearer" in told["error"]["message"]
    asked = {"prompt": "Hi", "max_tokens": 1}
    assert locked.post("v1/completions", asked, Authorization=f"Bearer {KEY}")[0] == 200


def test_two_keys_are_none(locked):
    connection = http.client.HTTPConnection(locked.url.removeprefix("http://"), timeout=60)
    connection.putrequest("GET", "/v1/models")
    for key in (KEY, "another"):
        connection.putheader("Authorization", f"Bearer {key}")
    connection.endheaders()
    assert connection.getresponse().status == 401
    connection.close()


def test_health_needs_no_key_and_neither_does_the_first_question_of_a_browser(locked):
    assert status(locked, "health") == 200
    asks = {"Origin": "http://a.example", "Access_Control_Request_Method": "POST"}
    assert status(locked, "v1/models", "OPTIONS", **asks) == 200
    assert status(locked, "v1/models", "OPTIONS", Origin="http://a.example") == 401


def test_without_cors_no_question_is_answered_without_the_key():
    with serving("ngram", api_key=KEY) as client:
        asks = {"Origin": "http://a.example", "Access_Control_Request_Method": "POST"}
        assert status(client, "v1/models", "OPTIONS", **asks) == 401


@pytest.mark.parametrize("chunked", [False, True])
def test_large_requests_are_refused(locked, chunked):
    key = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    body = b'{"prompt": "' + b" " * (1 << 20) + b'"}'
    connection = http.client.HTTPConnection(locked.url.removeprefix("http://"), timeout=60)
    pieces = (body[start : start + 65536] for start in range(0, len(body), 65536))
    connection.request("POST", "/v1/completions", pieces if chunked else body, key, encode_chunked=chunked)
    answer = connection.getresponse()
    assert answer.status == 413 and b"--max-request-mib" in answer.read()
    connection.close()
    assert locked.post("v1/completions", {"prompt": "Hi", "max_tokens": 1}, **key)[0] == 200


def test_only_the_name_of_the_target_is_loaded():
    with serving("ngram", admin=True) as client:
        loaded = client.server._model_manager.loaded_models
        spellings = (f"{TARGET}/", f"{TARGET}:/any/path/x.gguf", f"{TARGET}:x.gguf", f"{TARGET}@main", "", 3, [TARGET])
        for name in (*spellings, None):
            code, answer = client.post("load_model", {"model": name})
            assert code == 400 and "alone" in answer["error"]["message"], name
        assert client.post("load_model", {})[0] == 400
        request = urllib.request.Request(f"{client.url}/load_model", f'{{"model": "{TARGET}"}}'.encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert b'"ready"' in answer.read()
        assert [*loaded] == [TARGET]


# -- before anything is loaded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "port", "told"),
    [
        ("localhost", 99999, "--port 99999: a port is a number from 1 to 65535"),
        ("localhost", 65536, "--port 65536"),
        ("localhost", -1, "--port -1"),
        ("no such host", 0, "--host no such host"),
        ("192.0.2.1", 0, "--host 192.0.2.1"),  # a network for documents, which no machine has
    ],
)
def test_addresses_that_cannot_be(host, port, told, monkeypatch, capsys):
    monkeypatch.setattr("hf_spec.serving.server.Server", None)
    assert main(["serve", TARGET, "--host", host, "--port", str(port)]) == 1
    assert told in capsys.readouterr().err


def test_an_address_that_is_taken(monkeypatch, capsys):
    monkeypatch.setattr("hf_spec.serving.server.Server", None)
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", TARGET, "--port", str(port)]) == 1
        assert f"the server cannot listen at localhost, port {port}" in capsys.readouterr().err
    check_address("localhost", port)
    check_address("localhost", 0)
    check_address("127.0.0.1", 65535 if port != 65535 else 65534)


def test_the_command_hands_the_policy_on(monkeypatch):
    made = {}
    monkeypatch.setattr("hf_spec.serving.server.Server", lambda *args, **options: made.update(options, args=args))
    assert main(["serve", TARGET]) == 0
    assert made["args"][:2] == (TARGET, "auto")
    assert Policy(**{one.name: made[one.name] for one in fields(Policy)}) == Policy()
    given = ["--max-prompt-tokens", "7", "--max-new-tokens", "8", "--max-beams", "9", "--max-request-mib", "10"]
    more = ["--shutdown-seconds", "0", "--media-hosts", "A.example,b.example:81", "--docs", "--admin"]
    more += ["--per-request-spec-decode-metrics", "summary"]
    monkeypatch.setenv("HF_SPEC_API_KEY", "from-outside")
    assert main(["serve", TARGET, *given, *more]) == 0
    hosts = ("a.example", "b.example:81")
    assert Policy(**{one.name: made[one.name] for one in fields(Policy)}) == Policy(
        7, 8, 9, 10, 0, "from-outside", hosts, True, True, "summary"
    )
    assert main(["serve", TARGET, "--api-key", KEY]) == 0 and made["api_key"] == KEY


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--api-key", ""], "a key has visible ASCII characters"),
        (["--api-key", "a b"], "a key has visible"),
        (["--media-hosts", "http://a.example"], "is no list of HOST"),
        (["--media-hosts", "a.example:0"], "is no list of HOST"),
        (["--max-beams", "0"], "is not a whole number of at least 1"),
    ],
)
def test_bad_policies_are_told(options, told, capsys):
    with pytest.raises(SystemExit):
        main(["serve", TARGET, *options])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        {"max_beams": 0},
        {"max_prompt_tokens": 2.5},
        {"max_new_tokens": True},
        {"shutdown_seconds": -1},
        {"api_key": ""},
        {"api_key": "a\nb"},
        {"media_hosts": "a.example"},
        {"media_hosts": ("a.example/x",)},
        {"per_request_spec_decode_metrics": "detailed"},
    ],
)
def test_policies_that_cannot_be(given):
    [name] = given
    with pytest.raises(ValueError, match=name):
        Policy(**given)


def test_what_is_a_host():
    assert all(map(is_host, ("a.example", "localhost", "127.0.0.1:8000", "a-b.c:1")))
    wrong = ("", ":80", "a..b", "a b", "a/b", "a@b", "a:", "a:65536", "*", "é.example", None, 3)
    assert not any(map(is_host, wrong))


def test_help_says_the_limits(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    told = capsys.readouterr().out
    limits = ("--max-prompt-tokens", "--max-new-tokens", "--max-beams", "--max-request-mib", "--shutdown-seconds")
    assert all(name in told for name in (*limits, "--api-key", "--media-hosts", "stop strings"))
