"""`scripts/benchmark.py`: benchmarks by name, and the questions that they answer."""

import sys
from collections.abc import Callable

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.bench import cases, compressed, experts, steps, streaming_cases
from ffn_heterogeneity.bench.peer import NEW, PROMPT
from ffn_heterogeneity.bench.timing import Questions, machine
from ffn_heterogeneity.io.rows import write_results

SHAPE, WHOLE, SIZE = r"^[^,]+|\d+ x \d+ tokens", r"^[^;]+", r"\[B.*(?=;)"
PEER, SPENT = "Torch's time / ours", "Times of the value and its gradient"
GENERATED = f"{PEER}; `generate n` continues n prompts of {PROMPT} tokens by {NEW}"
AHEAD = f"{PEER}, over the same ratio of another model in the same rounds"
FUSED = "Time / the whole model's; three quarters of the FFNs' neurons, or weights, of the last "
FUSED += "two thirds of its layers (with experts: of the last 4 sparse layers of each stack) are "
FUSED += "gone; with LoRA none"
PIECES = "Times of a whole step / that of the last config, on one model"
MODEL: Questions = {
    "Is a training step as fast as torch's?": (PEER, r"train step, (\w+)", SHAPE),
    "Is a forward pass as fast as torch's?": (PEER, r"forward, (\w+)", SHAPE),
    "Is perplexity as fast as torch's?": (PEER, r"perplexity, (\w+)", WHOLE),
    "Is generating as fast as torch's?": (GENERATED, r"(generate \d+, \w+)", r"^[^,]+"),
    "Do NUCL and JREG slow a step?": ("With / without", r".* \+ (.*) / train step, .*", SHAPE),
    "Do MacDrop and DoRA slow LoRA steps?": ("Time / LoRA's", r".* of (.*) / train.*", SHAPE),
    # Of the calls themselves: those with a term have a "+".
    "Is a model as far ahead of torch as another?": (AHEAD, r"(.*, \w+ / .*)'s", SHAPE),
    "Is a model faster than another?": ("Time / the other's", r"(.*, \w+ over .*)", SHAPE),
    "Is bfloat16 faster?": ("Time in float32 / bfloat16", r"([^+]+), float32 / bfloat16", WHOLE),
}
NUCL: Questions = {
    "What does NUCL add to an update?": ("Times added to the update", r"(.* / .*)", r"W \[.*?(?=;)")
}
NLL: Questions = {
    "What does the loss cost compared with products?": (SPENT, r"((?:plain|chunked) / .*)", SIZE),
    "What do few target positions save?": (SPENT, r"(1 target in .* / .*)", SIZE),
}
FUSION: Questions = {
    "Is a compressed model trained faster?": (FUSED, r"(\w+), step / .*", WHOLE),
    "Does a compressed model answer faster?": (FUSED, r"(\w+), forward / .*", WHOLE),
}
STEPS: Questions = {"What do pieces of a training step cost?": (PIECES, r"(.* / .*)", WHOLE)}
OF_LAYER = "Times of one layer; dense layer: with as many neurons as a token's experts together"
EXPERTS: Questions = {
    "What does a forward pass of experts cost?": (OF_LAYER, r"forward: (.*)", r"\d+ x \d+ tokens"),
    "What does a training step of experts cost?": (OF_LAYER, r"step: (.*)", r"\d+ x \d+ tokens"),
}
STREAMING: Questions = {
    "How long does surgery on disk take vs a copy?": ("Times", r"(process / copy)", r"^[^,]+")
}
# name: ((config, working directory, reader of other config files) -> results, its questions: they
# are saved with the results, and are the sections of docs/benchmarks.md, in this order).
CASES: dict[str, tuple[Callable[..., dict], Questions]] = {
    "model": (cases.time_model, MODEL),
    "nucl": (cases.time_nucl, NUCL),
    "nll": (cases.time_nll, NLL),
    "fusion": (compressed.time_fusion, FUSION),
    "steps": (lambda config, _, load: steps.benchmark_steps(config, load), STEPS),
    "streaming": (streaming_cases.time_streaming, STREAMING),
    "experts": (experts.time_experts, EXPERTS),
}


def run(
    config: ConfigDict, workdir: epath.Path, load: Callable[[str], ConfigDict] | None = None
) -> dict:
    """Run the benchmark `config.name`; return what is in `results.json`.

    Args:
      load: reads "configs/x.py:argument", which the benchmark "steps" names.

    Raises:
      ValueError: no such benchmark.
    """
    if config.name not in CASES:
        raise ValueError(f"benchmark {config.name!r}: write scripts/benchmark.py {'|'.join(CASES)}")
    case, questions = CASES[config.name]
    results = {"benchmark": config.name, "questions": questions, "machine": machine()}
    results |= case(config, workdir, load)
    write_results(workdir, results)
    print(workdir / "results.json", file=sys.stderr)
    return results
