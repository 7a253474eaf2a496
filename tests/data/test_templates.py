"""Chat templates that loop or grow without end are stopped; ordinary ones are unchanged."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_messages import GEMMA
from tiny_models import byte_tokenizer, save_tiny
from tiny_runs import refused

from ffn_heterogeneity.data import templates
from ffn_heterogeneity.data.packing import Encoder
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.tasks.messages import Message, encode_conversation
from ffn_heterogeneity.data.templates import render_template
from ffn_heterogeneity.io import child, tokenizer_files
from ffn_heterogeneity.io.gguf.tokenizer import read_tokenizer

TALK = [{"role": "user", "content": "Äh\n"}, {"role": "assistant", "content": "<b> \ud83d \u2028"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROW = "{% set n = namespace(x='x') %}{% for i in range(COUNT) %}{% set n.x = n.x ~ n.x %}"
GROW += "{% endfor %}{{ n.x }}"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
RUNAWAY = [
    (GROW.replace("COUNT", "60"), "wants more than 512 MB"),
    (GROW.replace("COUNT", "24"), "writes 16,777,216 characters"),
    ("{{ 'x' * 10**11 }}", "wants more than 512 MB"),
    ("{{ 'x'.ljust(10**11) }}", "wants more than 512 MB"),
    ("{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}", "wants more than 512 MB"),
    ("{{ '%99999999999d' % 1 }}", "wants more than 512 MB"),
]
LONG = [LOOP, CALLS, "{{ 9 ** (9 ** 9) }}", "{{ lipsum(n=10**7) }}"]


@pytest.fixture
def impatient(monkeypatch):
    """Gives templates half a second."""
    monkeypatch.setattr(templates, "SECONDS", 0.5)


def rendered(template, **options):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template, tokenizer.name_or_path = template, "some/model"
    return render_template(tokenizer, TALK, **options)


@pytest.mark.parametrize(("template", "why"), RUNAWAY)
def test_what_grows_without_end_is_stopped(template, why):
    with pytest.raises(ValueError, match=rf"template of some/model is stopped: it {why}") as bad:
        rendered(template)
    assert not isinstance(bad.value, DataError) and "\n" not in str(bad.value)
    process = child.kept("template", templates.BYTES, os.getpid()).process
    with open(f"/proc/{process.pid}/status") as file:
        (peak,) = [int(line.split()[1]) for line in file if line.startswith("VmHWM")]
    assert peak < 1e6, "kB"


def test_what_loops_is_stopped_off_the_main_thread(impatient, tmp_path):
    """A template from a model's directory is stopped; the next conversation gets a new process."""
    directory = save_tiny(tmp_path / "model")
    (directory / "chat_template.jinja").write_text(LOOP)
    encoder = Encoder(tokenizer_files.read_tokenizer(directory))
    talk = (Message("user", "a"), Message("assistant", "b"))
    with ThreadPoolExecutor(3) as pool:
        looping = pool.submit(encode_conversation, talk, encoder)
        texts = pool.map(rendered, ["{{ messages[0].content }}", "{{ eos_token }}"])
        assert list(texts) == ["Äh\n", "</s>"]
        refused(f"of {directory} .* computes for more than 0.5 s", looping.result)


@pytest.mark.slow
@pytest.mark.parametrize("template", LONG)
def test_what_computes_without_end_is_stopped(impatient, template):
    refused("some/model is stopped: it computes for more than", rendered, template)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for i in range(10**12) %}x{% endfor %}", "Range too big"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "maximum recursion depth"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "maximum recursion depth"),
        ("{{ raise_exception('one\ntwo') }}", r"\(one\)"),
        ("{{ raise_exception('') }}", "TemplateError"),
    ],
)
def test_what_refuses_is_named(template, why):
    refused(f"some/model.*{why}", rendered, template, error=DataError)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_ordinary_templates_write_what_they_wrote(smollm2_gguf, name):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = GEMMA
    if name == "smollm2":
        tokenizer = read_tokenizer(smollm2_gguf)
        assert tokenizer.name_or_path == str(smollm2_gguf) and tokenizer.chat_template
    three = [*TALK, {"role": "user", "content": "x" * 10**6 + "'{{"}]
    for talk in (TALK[:1], TALK, three):
        for option in ("add_generation_prompt", "continue_final_message"):
            for value in (True, False):
                wanted = tokenizer.apply_chat_template(talk, tokenize=False, **{option: value})
                assert render_template(tokenizer, talk, **{option: value}) == wanted
