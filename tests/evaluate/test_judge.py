"""The judge against a server in this process: good answers and every kind of bad one."""

import json
import os
import re
import sys
import time

import anyio
import pytest
from judge_server import KEY, Server, chat
from tiny_models import config_of, run_script
from tiny_runs import read_rows, refused, write_rows

from ffn_heterogeneity.evaluate.chat import endpoint, judge
from ffn_heterogeneity.evaluate.chat.endpoint import Endpoint, EndpointError
from ffn_heterogeneity.evaluate.run import check_config


def user_text(request):
    return request["messages"][-1]["content"]


@pytest.fixture
def files(tmp_path):
    """Three questions, answers of two models, and references, in the benchmark's form."""

    questions = [
        {"question_id": i, "category": kind, "turns": [f"Ask {i}", f"And {i} {{x}}"]}
        for i, kind in enumerate(["writing", "math", "writing"])
    ]
    write_rows(tmp_path / "data/mt_bench/test.jsonl", questions)
    paths = {"gold": tmp_path / "data/mt_bench/reference_gpt4.jsonl"}
    paths |= {name: tmp_path / f"{name}.jsonl" for name in ("ours", "theirs")}
    for model, path in paths.items():
        said = [[f"{model} says {i}", f"{model} adds {i}"] for i in range(3)]
        common = {"answer_id": "a", "model_id": model, "tstamp": 1.0}
        choices = [[{"index": 0, "turns": turns}] for turns in said]
        write_rows(
            path, [{"question_id": i, "choices": x, **common} for i, x in enumerate(choices)]
        )
    return {"data_root": str(tmp_path / "data"), **{k: str(path) for k, path in paths.items()}}


def config_for(server, files, **changes):
    defaults = {"benchmark": "mt_bench", "data_root": files["data_root"], "answers": files["ours"]}
    defaults |= {"url": server.url, "judge_model": "the/judge", "key_env": "JUDGE_KEY"}
    defaults |= {"timeout": 5.0, "retries": 2, "workers": 2}
    return config_of("judge", **{**defaults, **changes})


def judged(config, out):
    return judge.run(check_config(config), None, out)


def nowhere(path, text):
    """No file under `path` holds the text."""
    files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    return files and not any(text.encode() in open(file, "rb").read() for file in files)


def test_ratings(server, files, tmp_path):
    """Ratings of every turn, FastChat's fields, means by turn and category; no file has the key."""
    server.behave = lambda n, data: chat(
        f"Good, as [[1]] of them. Key {KEY}.\nRating: [[{8 if 'And' in user_text(data) else 6}]]"
    )
    results = judged(config_for(server, files), tmp_path / "out")
    assert (results["judged"], results["failed"], results["errors"]) == (6, 0, [])
    # The mean of every question is 7.
    assert results["score"] == results["score_high"] == pytest.approx(7.0)
    assert results["by_turn"] == {"1": 6.0, "2": 8.0}
    assert results["by_category"] == {"writing": 7.0, "math": 7.0}
    assert results["judgments"].endswith("model_judgment/the_judge_single.jsonl")
    rows = read_rows(results["judgments"])
    places = [(row["question_id"], row["turn"]) for row in rows]
    assert places == [(i, turn) for i in range(3) for turn in (1, 2)]
    fields = "question_id model judge user_prompt judgment score turn tstamp"
    assert " ".join(rows[0]) == fields
    names = {(row["question_id"], row["turn"]): row["judge"] for row in rows}
    assert names[0, 1] == ["the/judge", "single"] and names[0, 2][1] == "single-multi-turn"
    assert names[1, 2][1] == "single-reference-multi-turn"
    # The judge gets the conversation up to the turn, and a reference if there is one.
    prompts = {(row["question_id"], row["turn"]): row["user_prompt"] for row in rows}
    assert "ours says 0" in prompts[0, 1] and "ours adds 0" not in prompts[0, 1]
    assert "ours says 0" in prompts[0, 2] and "ours adds 0" in prompts[0, 2]
    assert "And 0 {x}" in prompts[0, 2] and "gold" not in prompts[0, 2]
    assert "gold says 1" in prompts[1, 1] and "gold adds 1" not in prompts[1, 1]
    path, headers, data = server.requests[0]
    assert path == "/v1/chat/completions" and headers["authorization"] == f"Bearer {KEY}"
    assert data["model"] == "the/judge" and data["temperature"] == 0.0
    assert data["max_tokens"] == 2048
    assert nowhere(tmp_path / "out", KEY) and "Key <key>." in rows[0]["judgment"]
    # All answers exist: nothing is asked again.
    again = judged(config_for(server, files), tmp_path / "out")
    assert len(server.requests) == 6 and again["score"] == results["score"]


# ---- pairs


def test_pairs_are_asked_both_ways(server, files, tmp_path):
    """A fair judge finds the better model; a judge that prefers the first place gives only ties."""

    def fair(n, data):
        text = user_text(data)
        ours_first = text.index("ours says") < text.index("theirs says")
        if "Ask 2" in text:
            return chat("[[C]]")
        better_ours = "Ask 0" in text
        return chat("[[A]]" if ours_first == better_ours else "[[B]]")

    server.behave = fair
    pair = {"mode": "pairwise", "baseline": files["theirs"]}
    results = judged(config_for(server, files, **pair), tmp_path / "fair")
    counts = {key: results[key] for key in ("wins", "losses", "ties", "inconsistent")}
    assert counts == {"wins": 2, "losses": 2, "ties": 2, "inconsistent": 0}
    assert results["models"] == ["ours", "theirs"] and len(server.requests) == 12
    assert results["win_rate"] == 0.5 and results["win_rate_low"] < 0.5 < results["win_rate_high"]
    row = read_rows(results["judgments"])[0]
    games = "g1_winner g1_user_prompt g1_judgment g2_winner g2_user_prompt g2_judgment"
    assert " ".join(row) == f"question_id model_1 model_2 {games} judge turn tstamp"
    assert (row["g1_winner"], row["g2_winner"]) == ("model_1", "model_1")
    assert results["judgments"].endswith("the_judge_pair.jsonl")
    server.behave = lambda n, data: chat("Always the first: [[A]]")
    results = judged(config_for(server, files, **pair), tmp_path / "biased")
    assert (results["ties"], results["inconsistent"], results["win_rate"]) == (6, 6, 0.5)
    # One of the two calls fails: no row, and both texts are kept.
    server.behave = lambda n, data: chat("[[A]]" if n % 2 == 0 else "no idea")
    config = config_for(server, files, **pair, workers=1, limit=1)
    results = judged(config, tmp_path / "half")
    assert (results["judged"], results["failed"]) == (0, 2) and results["win_rate"] is None
    failed = read_rows(tmp_path / "half" / "failed.jsonl")[0]
    assert (failed["g1_winner"], failed["g2_winner"]) == ("model_1", "error")
    assert failed["g2_judgment"] == "no idea" and "no verdict" in failed["error"]


# ---- endpoints that fail


def hang(n, data):
    return 200, {}, [(60, b"{}")]


def drip(n, data):
    return 200, {}, [(0.05, b" ")] * 400


FAILURES = {
    "hangs": (hang, "no answer within 1 s"),
    "drips": (drip, "no answer within 1 s"),
    "500": (lambda n, d: (500, {}, b"broken"), "HTTP 500 .*: broken"),
    "401": (lambda n, d: (401, {}, f"bad key {KEY}".encode()), "HTTP 401 .*: bad key <key>"),
    "redirect": (lambda n, d: (302, {"Location": "http://127.0.0.1:1/"}, b""), "HTTP 302"),
    "no JSON": (lambda n, d: (200, {}, b"<html>hello"), "the answer is no JSON: '<html>hello'"),
    "not UTF-8": (lambda n, d: (200, {}, b"\xff\xfe"), "no JSON"),
    "other JSON": (lambda n, d: (200, {}, b'{"error": 1}'), "no chat completion"),
    "a list": (lambda n, d: (200, {}, b"[]"), "no chat completion"),
    "null": (lambda n, d: chat(None), "holds no text"),
    "no text": (lambda n, d: chat("  "), "holds no text"),
    "nonsense": (lambda n, d: chat("What a nice day."), r"no rating \[\[1\]\]"),
    "too high": (lambda n, d: chat("[[99]]"), "the rating 99 is outside"),
    "cut short": (lambda n, d: (200, {"Content-Length": "900"}, b"{"), "no connection"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_kept_and_asked_again(server, files, tmp_path, name, capsys):
    """Failures are counted, stored with a reason and reported; the next run repeats only these."""
    behave, why = FAILURES[name]
    ask = "And 1"
    server.behave = lambda n, data: behave(n, data) if ask in user_text(data) else chat("[[4]]")
    config = config_for(server, files, timeout=1.0, retries=0)
    results = judged(config, tmp_path / "out")
    assert (results["judged"], results["failed"], results["score"]) == (5, 1, 4.0)
    (failed,) = read_rows(tmp_path / "out" / "failed.jsonl")
    assert (failed["question_id"], failed["turn"], failed["score"]) == (1, 2, None)
    (error,) = results["errors"]
    assert error == {"question_id": 1, "turn": 2, "error": failed["error"]}
    assert re.search(why, failed["error"]), failed["error"]
    said = capsys.readouterr().err
    assert "1 of 6 judgments failed (question 1, turn 2" in said and "failed.jsonl" in said
    assert nowhere(tmp_path / "out", KEY) and KEY not in said
    if name in ("nonsense", "too high"):
        assert failed["judgment"] in ("What a nice day.", "[[99]]")
    server.behave, asked = (lambda n, data: chat("[[10]]")), len(server.requests)
    results = judged(config, tmp_path / "out")
    assert len(server.requests) == asked + 1
    assert (results["judged"], results["failed"], results["score"]) == (6, 0, 5.0)
    assert len(read_rows(tmp_path / "out" / "failed.jsonl")) == 1  # nothing is lost


def test_busy_servers_are_tried_again(server, monkeypatch):
    """A 429 is repeated after the client's or the server's wait; other errors are final."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)  # not sent to an endpoint without a key
    waits, sleep = [], anyio.sleep
    monkeypatch.setattr(anyio, "sleep", lambda seconds: waits.append(seconds) or sleep(0))
    made = Endpoint(url=server.url + "/v1/", model="m", retries=4)
    heads = [{}, {"Retry-After": "7"}, {"Retry-After": "nan"}, {"Retry-After": "Fri, 1 Jan"}]
    server.behave = lambda n, d: (429, heads[n], b"slow down") if n < 4 else chat("[[7]]")
    assert made.ask("s", "u") == "[[7]]"
    assert len(waits) == 4 and waits[1] == 7.0 and 0.3 < waits[0] < waits[2] < waits[3] <= 8
    path, headers, data = server.requests[-1]
    assert path == "/v1/chat/completions" and "authorization" not in headers
    assert [m["role"] for m in data["messages"]] == ["system", "user"]
    assert "max_tokens" not in data
    server.behave = lambda n, d: (503, {}, b"")
    refused(r"HTTP 503 .*\(5 tries\)", made.ask, "s", "u", error=EndpointError)
    server.behave = lambda n, d: (400, {}, b"no such model")
    for message in ("HTTP 400 .*no such model$", "not asked: the run was ended"):
        refused(message, made.ask, "s", "u", error=EndpointError)
        made.stop()


def test_nobody_there(server, files, tmp_path, capsys):
    """Without a server the run ends soon; the next run asks all questions."""
    dead = Server()
    dead.close()
    server.url = dead.url
    config = config_for(server, files, retries=0, give_up_after=3, workers=1)
    start = time.monotonic()
    results = judged(config, tmp_path / "out")
    assert time.monotonic() - start < 5
    assert (results["judged"], results["failed"], results["score"]) == (0, 6, None)
    said = [error["error"] for error in results["errors"]]
    assert sum("no connection" in error for error in said) >= 3
    assert "the rest is skipped" in capsys.readouterr().err
    alone = judged(config_for(server, files, retries=0, give_up_after=0), tmp_path / "all")
    assert all("no connection" in error["error"] for error in alone["errors"])


# ---- settings and files


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "triple"}, "mode='triple'"),
        ({"mode": "pairwise"}, "pairwise compares with the answers of a baseline"),
        ({"baseline": "x"}, "single has none"),
        ({"answers": ""}, "give --config.answers"),
        ({"answers": "/nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"judge_model": ""}, "give --config.judge_model"),
        ({"url": ""}, "url='' is not an address"),
        ({"url": "file:///etc/passwd"}, "is not an address"),
        ({"key_env": "NO_SUCH_VARIABLE"}, "variable NO_SUCH_VARIABLE, which key_env names, is not"),
        ({"workers": 0}, "workers=0"),
        ({"timeout": 0.0}, "timeout=0.0"),
        ({"retries": -1}, "retries=-1"),
        ({"data_root": "/nowhere"}, "has no folder mt_bench"),
    ],
)
def test_settings_that_cannot_be(server, files, tmp_path, changes, message):
    refused(message, judged, config_for(server, files, **changes), tmp_path / "out")
    assert not server.requests


@pytest.mark.parametrize("status", [200, 400])
def test_half_a_key_is_not_kept(server, files, tmp_path, status):
    """A body that has the key where the report cuts it."""
    for before in (90, 190, 1990):
        body = ("x" * before + KEY + "y" * 50).encode()
        server.behave = lambda n, data, body=body: (status, {}, body)
        out = tmp_path / f"{status}_{before}"
        judged(config_for(server, files, retries=0, limit=1), out)
        assert nowhere(out, KEY[:8])


def test_other_answers_are_judged_anew(server, files, tmp_path):
    server.behave = lambda n, data: chat(f"[[{9 if 'ours' in user_text(data) else 2}]]")
    config = config_for(server, files)
    assert judged(config, tmp_path / "out")["score"] == 9
    os.replace(files["theirs"], files["ours"])
    again = judged(config, tmp_path / "out")
    assert (again["models"], again["score"], again["judged"]) == (["theirs"], 2, 6)
    assert all(row["model"] == "theirs" for row in read_rows(again["judgments"]))


def test_a_key_that_is_none_is_not_shown(server, files, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-secret\nX-Header: y")
    with pytest.raises(ValueError, match="invalid characters") as caught:
        check_config(config_for(server, files))
    assert "secret" not in str(caught.value)


def test_a_key_is_in_no_log_and_no_repr(server, caplog):
    """The key is absent also with the client's debug log."""
    server.behave = lambda n, data: (401, {}, f"bad key {KEY}".encode())
    made = Endpoint(url=server.url, model="m", key=KEY, retries=0)
    with caplog.at_level("DEBUG"), pytest.raises(EndpointError) as failed:
        made.ask("s", "u")
    assert server.url in str(failed.value) and len(caplog.records) > 3
    for text in (caplog.text, repr(made), str(failed.value), failed.value.body):
        assert KEY not in text


def test_without_the_client(server, files, monkeypatch):
    endpoint._library.cache_clear()
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ImportError, match=r"pip install 'ffn-heterogeneity\[judge\]'"):
        check_config(config_for(server, files))


def test_answers_that_lack(server, files, tmp_path, capsys):
    """Questions without an answer are counted; the same model twice is no pair."""
    with open(files["ours"]) as file:
        lines = file.readlines()
    with open(files["ours"], "w") as file:
        file.writelines(lines[:2])
    server.behave = lambda n, data: chat("[[5]]")
    results = judged(config_for(server, files), tmp_path / "out")
    assert (results["judged"], results["unanswered"]) == (4, 1)
    assert "1 questions have no answer yet" in capsys.readouterr().err
    twice = {"mode": "pairwise", "baseline": files["ours"]}
    refused("both of 'ours'", judged, config_for(server, files, **twice), tmp_path / "twice")


def test_the_script(server, files, tmp_path):
    server.behave = lambda n, data: chat("[[9]]")
    settings = {"answers": files["ours"], "data_root": files["data_root"], "url": server.url}
    settings |= {"judge_model": "j", "key_env": "JUDGE_KEY", "workdir": tmp_path / "out"}
    done = run_script("evaluate", config="configs/judge.py", **settings)
    assert done.code == 0, done.err
    assert "score 9.00" in done.out and nowhere(tmp_path / "out", KEY)
    assert json.loads((tmp_path / "out" / "results.json").read_text())["score"] == 9.0
