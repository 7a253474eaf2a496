"""Effects of bfloat16 on real models: a small change of perplexity, a few changed choices."""

import jax.numpy as jnp
import numpy as np
import pytest

from ffn_heterogeneity.data.windows import text_windows
from ffn_heterogeneity.evaluate.perplexity import perplexity
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models.options import RunOptions

pytestmark = pytest.mark.slow
DTYPES = {name: RunOptions(compute_dtype=jnp.dtype(name)) for name in ("float32", "bfloat16")}


@pytest.mark.parametrize("name", ["smollm2_gguf", "gemma3_gguf"])
def test_perplexity_stays_within_a_third_of_a_percent(name, request, shared_data):
    """40 windows of 256 tokens of WikiText-2."""
    model = load_model(request.getfixturevalue(name))
    text = (shared_data / "wikitext2" / "test.raw.txt").read_text()[:80_000]
    rows = text_windows(text, model.tokenizer, 256, 40)
    perplexities = {}
    for dtype, options in DTYPES.items():
        made = perplexity(model.config, model.params, rows, options=options)
        perplexities[dtype] = made["perplexity"]
    print(f"{name}: {perplexities}, {perplexities['bfloat16'] / perplexities['float32'] - 1:+.3%}")
    assert len(rows) == 40 and abs(perplexities["bfloat16"] / perplexities["float32"] - 1) <= 3e-3


def test_few_of_200_answers_change(lm_eval, shared_data, smollm2_gguf):
    """PIQA and HellaSwag, 100 questions each."""
    from ffn_heterogeneity.evaluate.harness import HarnessLM
    from ffn_heterogeneity.evaluate.harness_tasks import make_task_pack

    model, chosen = load_model(smollm2_gguf), {}
    for dtype, options in DTYPES.items():
        pack = make_task_pack(str(shared_data), ["piqa", "hellaswag"], num_fewshot=0)
        lm = HarnessLM(model, batch_size=20, options=options)
        samples = lm_eval.simple_evaluate(lm, **pack._asdict(), limit=100, bootstrap_iters=0)
        rows = [row for rows in samples["samples"].values() for row in rows]
        scores = [[float(answer[0][0]) for answer in row["resps"]] for row in rows]
        chosen[dtype] = [int(np.argmax(answer_scores)) for answer_scores in scores]
    changed = np.not_equal(*chosen.values())
    print(f"SmolLM2, bfloat16: {changed.sum()} of {changed.size} choices differ from float32's")
    assert changed.size == 200 and changed.sum() <= 10
