"""Our language model for the harness, compared with its torch model on the same weights."""

import copy
import dataclasses
import io
import json
import re
import sys

import numpy as np
import pytest
from task_tools import hf_model, instance
from tiny_models import LLAMA, TEXT, byte_tokenizer, config_of, random_params, run_script, save_tiny
from tiny_runs import refused
from tokenizers import processors

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.config import LayerConfig
from ffn_heterogeneity.models.generate import Sampling

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SMALL = dataclasses.replace(LLAMA, layers=(LayerConfig(12),) * 2, max_position=96)


def lm_of(tokenizer=None, max_length=None, stop=(), **changes):
    from ffn_heterogeneity.evaluate.harness import HarnessLM

    config = dataclasses.replace(SMALL, **changes)
    model = Model(config, random_params(SMALL), tokenizer or byte_tokenizer(), "tiny")
    return HarnessLM(model, batch_size=4, batch_tokens=128, max_length=max_length, stop=stop)


@pytest.fixture(scope="module")
def tiny(lm_eval):
    return lm_of()


@pytest.fixture(scope="module")
def torch_lm(torch, lm_eval, accelerate, tmp_path_factory):
    return hf_model(torch, save_tiny(tmp_path_factory.mktemp("tiny"), SMALL))


PAIRS = [
    ("The cat", " sat"),
    ("The cat", " sat on the mat"),
    ("The cat ", "sat"),  # the space goes to the continuation
    ("", "an empty context"),
    ("<s>begins with a bos", " of its own"),
    ("ü", "ber"),
    (TEXT[:150], TEXT[150:170]),  # longer than the model's positions: the oldest tokens are cut
]


def test_loglikelihoods_are_those_of_the_torch_model(tiny, torch_lm):
    requests = [instance(*pair) for pair in PAIRS]
    ours, theirs = tiny.loglikelihood(requests), torch_lm.loglikelihood(requests)
    for pair, (a, greedy), (b, their_greedy) in zip(PAIRS, ours, theirs, strict=True):
        assert abs(a - b) <= 1e-3 and greedy == their_greedy, pair
    # Whole texts, window after window.
    texts = [instance(TEXT[:400]), instance("short")]
    ours = tiny.loglikelihood_rolling(texts)
    theirs = torch_lm.loglikelihood_rolling(texts)
    np.testing.assert_allclose(ours, theirs, atol=2e-3)


def test_generations_are_those_of_the_torch_model(tiny, torch_lm):
    prompts = ["The cat", "A longer prompt, to pad the other", "x"]
    wanted = {"until": ["\n\n\n"], "do_sample": False, "max_gen_toks": 24}
    requests = [instance(prompt, dict(wanted)) for prompt in prompts]
    assert tiny.generate_until(requests) == torch_lm.generate_until(requests)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_every_request_moves_a_bar(tiny, monkeypatch):
    """On a terminal; a caller's progress bar gets every batch."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    tiny.loglikelihood([instance("The cat", " sat"), instance("A", " dog"), instance("A", " rat")])
    tiny.generate_until([instance("x" * i, {"until": [], "max_gen_toks": 2}) for i in (1, 2, 3)])
    shown = sys.stderr.getvalue()
    for label in ("encode", "log-likelihoods", "generate"):
        assert f"{label}: 100%" in shown and re.search(rf"{label}: .* 3/3 \[", shown)
    reported = []
    tiny.generator([[2]] * 6, Sampling(2), progress=reported.append)
    assert reported == [4, 2], "batches of 4"


def test_long_prompts_lose_what_the_torch_model_loses(tiny, torch_lm):
    """Prompts are cut to the model's positions or a smaller `max_length`; a bos is kept."""
    wanted = {"until": ["\n\n\n"], "max_gen_toks": 20}
    requests = [instance(TEXT[i : i + 200], wanted) for i in range(0, 120, 10)]
    assert tiny.generate_until(requests) == torch_lm.generate_until(requests)
    short = lm_of(max_length=50)
    torch_lm._max_length, before = 50, torch_lm._max_length
    try:
        assert short.generate_until(requests) == torch_lm.generate_until(requests)
    finally:
        torch_lm._max_length = before
    assert short.generate_until(requests) != tiny.generate_until(requests)
    ids = [0, *short.tok_encode(TEXT[:200])]
    assert short._prompt(f"<s>{TEXT[:200]}", 20) == [0, *ids[-29:]]
    assert short._prompt(f"<s>{TEXT[:200]}", 49) == ids[-1:]
    with pytest.raises(ValueError, match="max_length=50 has no room for a prompt and the 50 new"):
        short.generate_until([instance("a", {"max_gen_toks": 50})])


def test_special_tokens_end_a_text(lm_eval):
    """The end is not in the text: a stop string or the tokenizer's eos, and texts with neither."""
    request = instance("The cat", {"until": ["never-there"], "max_gen_toks": 40})
    generation = lm_of(eos_id=None).generator([byte_tokenizer().encode("The cat")], Sampling(40))[0]
    place = next(i for i in range(2, 40) if generation.tokens[i] not in generation.tokens[:i])
    name = byte_tokenizer().convert_ids_to_tokens(generation.tokens[place])
    wanted = byte_tokenizer().decode(generation.tokens[:place])
    stopped, ended = byte_tokenizer(), byte_tokenizer()
    stopped.add_special_tokens({"additional_special_tokens": [name]})
    lm = lm_of(stopped, eos_id=None)
    named = instance("The cat", {"until": [name], "max_gen_toks": 40})
    assert lm.generate_until([named]) == [wanted]
    assert len(lm.generate_until([request])[0]) > len(wanted)
    ended.eos_token = name
    assert lm_of(ended, eos_id=(257,)).generate_until([request]) == [wanted]
    # An ordinary token is searched in the text.
    stop, eos = lm_of()._ends(["a", "ab", "</s>", "</s>b"])
    assert stop == ("a", "ab", "</s>b") and eos == (1,)
    # The stop strings of the config are added to those of the request.
    assert lm_of(stop=("\n[eod]",))._sampling({"until": "a"}).stop == ("a", "\n[eod]")


def test_without_any_eos(lm_eval):
    bare = byte_tokenizer()
    bare.eos_token = bare.bos_token = None
    lm = lm_of(bare, eos_id=None, bos_id=None)
    assert lm.eot_token_id is None
    request = instance("The cat", {"until": ["never-there"], "max_gen_toks": 9})
    assert len(lm.generate_until([request])[0].encode()) >= 9
    assert lm.loglikelihood([instance("a", "b")])[0][0] < 0
    for call in (
        lambda: lm.loglikelihood([instance("", "b")]),
        lambda: lm.loglikelihood_rolling([instance("b")]),
        lambda: lm.generate_until([instance("", {"max_gen_toks": 9})]),
    ):
        refused("neither bos nor eos: name one", call)


def test_contexts_without_tokens(tiny):
    """White space belongs to the continuation; an empty context becomes the bos."""
    pairs = [("  ", "b"), ("", "  b"), ("<s>", "  b"), ("\n", " b")]
    scores = tiny.loglikelihood([instance(*pair) for pair in pairs])
    assert scores[0] == scores[1] == scores[2] != scores[3]
    wanted = {"until": ["\n\n\n"], "max_gen_toks": 9}
    empty, bos = (tiny.generate_until([instance(text, wanted)]) for text in ("", "<s>"))
    assert empty == bos
    for pair in [("", ""), ("a question", "")]:
        with pytest.raises(ValueError, match=f"answer '' after '{pair[0]}' adds no token"):
            tiny.loglikelihood([instance("a", "b"), instance(*pair)])


def test_a_bos_stands_first_once(tiny, gemma3_tokenizer):
    assert tiny.tok_encode("ab") == tiny.tokenizer.encode("ab")
    gemma = gemma3_tokenizer
    from ffn_heterogeneity.evaluate.harness import HarnessLM

    lm = HarnessLM.__new__(HarnessLM)
    lm.tokenizer, lm.add_bos = gemma, None
    assert lm.tok_encode("The")[0] == gemma.bos_token_id
    assert lm.tok_encode("<bos>The") == lm.tok_encode("The")
    assert lm.tok_encode("The", add_special_tokens=False) == lm.tok_encode("The")[1:]
    lm.add_bos = False
    assert lm.tok_encode("The")[0] != gemma.bos_token_id
    # "always" also where the tokenizer's rule adds none, and once where it does.
    lm.add_bos = True
    assert lm.tok_encode("The") == lm.tok_encode("<bos>The")
    silent = copy.deepcopy(gemma)
    silent._tokenizer.post_processor = processors.Sequence([])
    lm.tokenizer = silent
    assert lm.tok_encode("The")[0] == gemma.bos_token_id and lm.tok_encode("The").count(2) == 1
    assert lm.tok_encode("The", add_special_tokens=False) == lm.tok_encode("The")[1:]
    silent.bos_token = None
    refused("no bos token", lm.tok_encode, "The")


def test_a_bos_that_is_added_is_not_scored(lm_eval):
    """A whole text's score: the bos is its context, added or not."""
    lm, texts = lm_of(), [instance("The cat sat on the mat")]
    plain = lm.loglikelihood_rolling(texts)
    lm.add_bos = True
    assert lm.loglikelihood_rolling(texts) == plain


def test_a_bos_stays_where_a_context_is_cut(tiny):
    bos, whole = tiny.tokenizer.bos_token_id, tiny.max_length
    context = [bos, *range(5, whole + 5)]
    kept, answer = tiny._fit(context, [7, 8])
    assert kept == [bos, *context[-(whole - 2) :]] and len(kept) == whole - 1
    assert answer == [7, 8]
    assert tiny._fit(context[1:], [7, 8])[0] == context[-(whole - 1) :]
    assert tiny._fit(context, [7] * whole) == (context[-1:], [7] * whole)


def test_unknown_generation_settings_are_refused(tiny):
    refused("num_beams", tiny.generate_until, [instance("a", {"until": ["\n"], "num_beams": 4})])
    model = Model(SMALL, random_params(SMALL), None, "somewhere")
    from ffn_heterogeneity.evaluate.harness import HarnessLM

    refused("somewhere has no tokenizer", HarnessLM, model)


def test_the_script_writes_scores_intervals_and_samples(tmp_path, lm_eval, shared_data):
    save_tiny(tmp_path / "model", dataclasses.replace(SMALL, max_position=512))
    settings = {"tasks": ("piqa", "mmlu"), "data_root": shared_data, "limit": 3, "num_fewshot": 0}
    settings |= {"model": tmp_path / "model", "workdir": tmp_path / "run"}
    done = run_script("evaluate", config="configs/harness.py", **settings)
    assert done.code == 0, done.err
    tasks = json.loads((tmp_path / "run" / "results.json").read_text())["tasks"]
    assert set(tasks) == {"piqa", "mmlu"} and tasks["piqa"]["n"] == tasks["mmlu"]["n"] == 3
    row = tasks["piqa"]
    assert row["acc_low"] <= row["acc"] <= row["acc_high"] and row["shots"] == 0
    samples = (tmp_path / "run" / "samples" / "piqa.jsonl").read_text().splitlines()
    assert len(samples) == 3 and all("resps" in json.loads(line) for line in samples)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("piqqa",)}, "piqqa.*piqa"),
        ({"tasks": ()}, "tasks=.*give names"),
        ({"data_root": "/nowhere/at/all"}, "no such directory"),
        ({"limit": -1}, "limit=-1"),
        ({"add_bos": "yes"}, "add_bos='yes'"),
        ({"batch_tokens": 0}, "batch_tokens=0"),
        ({"evaluation": "magic"}, "evaluation='magic'"),
        ({"tasks": ("mbpp",)}, "mbpp runs programs.*allow_code_execution"),
    ],
)
def test_settings_that_cannot_be(tmp_path, changes, message):
    from ffn_heterogeneity.evaluate.run import check_config

    config = config_of("harness", model="x", **{"data_root": str(tmp_path), **changes})
    refused(message, check_config, config)
