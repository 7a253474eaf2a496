"""The model card, and a push to a stand-in of the hub's HTTP interface on this machine."""

import base64
import dataclasses
import json
import re
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from tiny_models import REPOSITORY, card_differs, config_of, run_script, save_tiny
from tiny_runs import flags_of, refused, run_program

import ffn_heterogeneity as fh
from ffn_heterogeneity.evaluate.run import score
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.fetch import models_directory
from ffn_heterogeneity.io.hf.card import (
    check_repository,
    hub_of,
    licence_of,
    published,
    push_directory,
    write_card,
)
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import in_memory
from ffn_heterogeneity.models.config import HeadConfig


class Hub(BaseHTTPRequestHandler):
    """A server with the requests of an upload; commits are stored in `server.files`."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        path, files = self.path.split("?")[0], self.server.files
        if self.headers["Authorization"] != "Bearer secret":
            return self.answer(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            address = f"http://{self.headers['Host']}/me/tiny"
            return self.answer(200, {"url": address, "name": "me/tiny", "id": "1"})
        if path == "/api/models/me/tiny/preupload/main":
            asked = json.loads(body)["files"]
            mode = {"uploadMode": "regular", "shouldIgnore": False}
            return self.answer(200, {"files": [{"path": file["path"], **mode} for file in asked]})
        if path == "/api/models/me/tiny/commit/main":
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    value = entry["value"]
                    files[value["path"]] = base64.b64decode(value["content"])
            address = f"http://{self.headers['Host']}/me/tiny/commit/abc"
            return self.answer(200, {"commitUrl": address, "commitOid": "abc", "success": True})
        return self.answer(200, {"errors": [], "warnings": []})  # the card's head, looked through

    def do_GET(self):
        if self.path.split("?")[0] != "/api/models/me/tiny":
            return self.answer(404, {"error": "Not found"})
        return self.answer(200, {"id": "me/tiny", "private": self.server.private})

    def answer(self, code, values):
        body = json.dumps(values).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.created, server.private = {}, [], True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def compress(hub, tmp_path, token):
    save_tiny(tmp_path / "tiny")
    flags = flags_of(workdir=f"run-{token}", model="tiny", push="me/tiny")
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path / "home")}
    env |= {"HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    script = REPOSITORY / "scripts" / "compress.py"
    return run_program(sys.executable, script, *flags, cwd=tmp_path, **env)


def test_a_pruned_model_is_pushed(hub, tmp_path):
    done = compress(hub, tmp_path, "secret")
    assert done.code == 0, done.err
    model = tmp_path / "run-secret" / "model"
    files = [file for file in model.rglob("*") if file.is_file()]
    assert hub.files == {str(file.relative_to(model)): file.read_bytes() for file in files}
    assert hub.created[0]["visibility"] == "private" and "me/tiny" in done.err.splitlines()[-1]
    results = json.loads((tmp_path / "run-secret" / "results.json").read_text())
    card = hub.files["README.md"].decode()
    for key in ("parameters_before", "parameters_after", "parameters_removed_percent", "ratio"):
        (value,) = re.findall(rf"^\| {key} \| (\S+) \|$", card, re.M)
        assert float(value) == pytest.approx(results[key], rel=5e-3)
    assert "by entropy" in card and "loads in: transformers" in card and "`tiny`" in card
    done = compress(hub, tmp_path, "wrong")
    assert done.code == 2 and "hf auth login" in done.err.splitlines()[-1]
    hub.private, hub.files = False, {}  # one that was there before
    (tmp_path / "run-secret" / "results.json").unlink()
    done = compress(hub, tmp_path, "secret")
    assert done.code == 2 and "it exists and is public" in done.err and not hub.files
    whole = tmp_path / "run-secret"
    refused(
        "is a work directory: push .*model", push_directory, whole, "a/b", error=CheckpointError
    )


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "../x", "a/", "a b/c"])
def test_bad_names_are_refused_before_anything_is_done(tmp_path, model, name):
    run = (f"--config.model={model}", f"--config.push={name}", f"--workdir={tmp_path}/run")
    assert repr(name) in run_script("compress", *run).error
    assert not (tmp_path / "run").exists()
    refused("config.json", push_directory, tmp_path, "me/tiny", error=CheckpointError)


def test_a_file_cannot_be_pushed():
    refused("is a file", check_repository, "a/b", "x.gguf", error=CheckpointError)


def test_licences(tmp_path):
    assert licence_of("x/smollm2-135m-instruct.gguf") == "apache-2.0"
    assert licence_of("google/gemma-2-2b") == "gemma" and licence_of("own/model") == ""
    save_tiny(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\n")
    save_tiny(tmp_path / "made")
    write_card(tmp_path / "made", str(tmp_path / "base"), "nothing", {"a": {"b": 1.5}, "c": True})
    card = (tmp_path / "made" / "README.md").read_text()
    assert "license: mit" in card and "| a/b | 1.5 |" in card and "| c |" not in card
    assert licence_of(str(tmp_path / "made")) == "mit"


def card_of(directory, base="smollm2"):
    write_card(directory, base, "nothing", {})
    text = (directory / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    return head, re.search(r"```python\n(.*?)```", text, re.S)[1]


def test_the_head_and_the_lines_that_load_it(tmp_path, monkeypatch, capsys, torch):
    """The card names the task and the base model for the hub, and its code runs."""
    made = save_tiny(tmp_path / "made")
    head, lines = card_of(made)
    known = {"library_name": "transformers", "license": "apache-2.0"}
    known |= {"pipeline_tag": "text-generation"}
    assert head == known | {"base_model": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    monkeypatch.chdir(made)
    names = {}
    exec(lines, names)
    assert names["model"].config.n_layers == 4 and len(capsys.readouterr().out) > 20
    uneven = tmp_path / "uneven"
    in_memory.surgery(config_of("prune", model=str(made), layers="1,3"), uneven)
    head, lines = card_of(uneven / "model", str(tmp_path / "gemma-3-270m.gguf"))
    known = {"library_name": "ffn_heterogeneity", "license": "gemma"}
    assert head == known | {"base_model": "google/gemma-3-270m"}
    monkeypatch.chdir(uneven / "model")
    exec(lines, names)
    assert names["model"].config.ffn_widths == (24, 18, 24, 18)


def test_values_that_are_no_numbers_and_zeros(tmp_path):
    """An infinite perplexity is printed, but no result for the hub; a metric of 0 is a result."""
    made = save_tiny(tmp_path / "made")

    def measured(facts, config=None):
        write_card(made, "x", "nothing", facts, config)
        text = (made / "README.md").read_text()
        return text, yaml.safe_load(text.split("---")[1])

    lost = {"perplexity_before": 12.5, "perplexity_after": float("inf"), "protocol": {"text": "a"}}
    text, head = measured(lost)
    assert "- perplexity: 12.5 before, inf after\n" in text and "model-index" not in head
    best = {"metric": "validation/matthews", "step": 0, "value": 0.0}
    facts = {"task": "cola", "exported_step": 0, "best": best}
    facts |= {"history": [{"step": 0, "validation/matthews": 0.0}]}
    config = load_model(made).config
    settings = {"pooling": "last", "outputs": 2, "labels": ["a\nb", "c"], "task": "cola"}
    head = HeadConfig.of("classification", settings | {"fields": [], "final_norm": "pooled"})
    text, head = measured(facts, dataclasses.replace(config, head=head))
    (result,) = head["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "matthews", "value": 0.0}]
    assert "- labels: 'a\\nb', 'c'\n" in text and "not measured" not in text


def test_what_a_model_was_made_from():
    known = {"gemma2_2b": "google/gemma-2-2b", "own/model": "own/model", "runs/x/model": ""}
    known |= {"minilm": "sentence-transformers/all-MiniLM-L6-v2", "/a/b": ""}
    known |= {"/data/gemma3": "", "someone/minilm": "someone/minilm", "/a/minilm-l6": ""}
    known |= {str(models_directory() / "minilm-l6"): known["minilm"]}
    known |= {"/a/gemma-3-270m.gguf": "google/gemma-3-270m"}
    assert {base: hub_of(base) for base in known} == known


STREAMED = {"streaming": True, "layers": "1,3", "dtype": "bfloat16", "calibration": "long.txt"}
BY_STATES = {"criterion": "mean_state", "calibration": "long.txt"}


@pytest.mark.parametrize("changes", [{}, STREAMED, BY_STATES])
def test_perplexity_before_and_after(model, text, tmp_path, changes):
    if "calibration" in changes:
        (tmp_path / "long.txt").write_text(Path(text).read_text() * 3000)
        changes = {**changes, "calibration": str(tmp_path / "long.txt")}
    model = shutil.copytree(model, tmp_path / "base")
    config = config_of(
        "prune", model=str(model), text=str(text), window=16, max_windows=6, **changes
    )
    returned = in_memory.surgery(config, tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results == returned and not card_differs(tmp_path / "model", results)
    for name, directory in (("before", model), ("after", tmp_path / "model")):
        measured = score(in_memory.check_surgery(config), load_model(str(directory)))
        assert results[f"perplexity_{name}"] == measured["perplexity"]
    assert results["perplexity_after"] != results["perplexity_before"]
    protocol = {"windows": 6, "tokens": 96, "bos": "none", "dtype": "float32"}
    assert results["protocol"] == {"text": str(text), **protocol}
    card = (tmp_path / "model" / "README.md").read_text()
    before, after = results["perplexity_before"], results["perplexity_after"]
    assert f"- perplexity: {before:.0f} before, {after:.0f} after\n" in card
    (measured,) = yaml.safe_load(card.split("---")[1])["model-index"][0]["results"]
    assert measured["dataset"]["name"] == text.name
    assert measured["metrics"] == [{"type": "perplexity", "value": round(after)}]
    line = f"- measured on: text {text.name}, windows 6, tokens 96, bos none, dtype float32"
    assert line in card
    widths = "2 layers of 24, 2 of 18" if "streaming" in changes else "4 layers of 18"
    assert f"- FFN widths: {widths}\n" in card
    # Pushed files do not contain local paths.
    for file in (tmp_path / "model").rglob("*"):
        assert str(tmp_path).encode() not in file.read_bytes(), file


def test_not_measured_is_said_and_a_bad_text_refused_first(model, tmp_path):
    in_memory.surgery(config_of("prune", model=str(model)), tmp_path / "a")
    assert "perplexity: not measured" in (tmp_path / "a" / "model" / "README.md").read_text()
    for changes in ({"text": "no.txt"}, {"text": "x", "token_ids": "y"}):
        with pytest.raises((ValueError, OSError), match=r"no.txt|exactly one"):
            in_memory.surgery(config_of("prune", model=str(model), **changes), tmp_path / "b")
    assert not (tmp_path / "b").exists()


PLACES = ("/a/c.txt", "~/b/c.txt", "../c.txt", "gs://a/b/c.txt", "C:\\a\\c.txt", "c.txt/")


@pytest.mark.parametrize("place", PLACES)
def test_of_a_place_its_name_is_published(place):
    assert published({"text": place, "ratio": 0.5}) == {"text": "c.txt", "ratio": 0.5}
    assert published({"model": "google/gemma-2-2b"}) == {"model": "google/gemma-2-2b"}


def test_a_gguf_file_has_a_name_and_a_licence(model, tmp_path):
    from gguf import GGUFReader

    options = {"tokenizer": None, "overwrite": True}
    for source, expected in (
        ("smollm2", {"name": "HuggingFaceTB/SmolLM2-135M-Instruct", "license": "apache-2.0"}),
        ("/home/me/runs/thin", {"name": "thin", "license": None}),
    ):
        fh.save_model(load_model(str(model)), tmp_path / "x.gguf", source=source, **options)
        fields = GGUFReader(tmp_path / "x.gguf").fields
        for key, value in expected.items():
            field = fields.get(f"general.{key}")
            assert (field and field.contents()) == value
