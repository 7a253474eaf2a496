"""Our models as a language model of lm-evaluation-harness (extra `eval`); torch is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from ffn_heterogeneity.evaluate.generate import Generator, Sampling
from ffn_heterogeneity.evaluate.scoring import score
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.causal_lm import RunOptions

try:
    from lm_eval.api.model import TemplateLM
except ImportError as error:
    raise ImportError(
        "lm-evaluation-harness is not installed: pip install 'ffn-heterogeneity[eval]'"
    ) from error

MAX_NEW_TOKENS = 256


class HarnessLM(TemplateLM):
    """A model for `lm_eval.simple_evaluate(model=HarnessLM(...))`.

    Tokens are made as the harness's own `hf` model makes them: the tokenizer's rule says whether a
    bos is put first, a text that already begins with one gets no second, trailing spaces of a
    context belong to its continuation, and an empty context is the bos (or eos) alone.

    Args:
      model: from `io.load.load_model`; with a tokenizer.
      options: how to compute.
      batch_size: rows of a batch of generation.
      batch_tokens: tokens of a batch of scoring.
      max_length: longest input; None: the model's positions.
      add_bos: None: as the tokenizer does; or True, False.
      mesh: see `Generator`.

    Raises:
      ValueError: the model has no tokenizer.
    """

    def __init__(
        self,
        model: Model,
        *,
        options: RunOptions = RunOptions(),
        batch_size: int = 8,
        batch_tokens: int = 2048,
        max_length: int | None = None,
        add_bos: bool | None = None,
        mesh: Mesh | None = None,
    ):
        super().__init__()
        if model.tokenizer is None:
            raise ValueError(f"{model.source} has no tokenizer: tasks are text, add its files")
        self.tokenizer, self.config = model.tokenizer, model.config
        self.max_length = max_length or model.config.max_position
        self.add_bos, self.batch_tokens = add_bos, batch_tokens
        self.generator = Generator(
            model.config, model.params, model.tokenizer,
            options=options, batch_size=batch_size, mesh=mesh,
        )  # fmt: skip

    @property
    def eot_token_id(self) -> int:
        eos = self.config.eos_id
        eos = self.tokenizer.eos_token_id if eos is None else eos
        return eos[0] if isinstance(eos, tuple) else eos

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self.tokenizer, "name_or_path", "")).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Ids of a text; `add_special_tokens` None: with a bos where there should be one."""
        add = self.add_bos if add_special_tokens is None else add_special_tokens
        bos = self.tokenizer.bos_token
        if add_special_tokens is None and bos and string.startswith(bos):
            add = False
        # The tokenizer's own rule, which is not always True.
        arguments = {} if add is None else {"add_special_tokens": add}
        return list(self.tokenizer.encode(string, **arguments))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the tokenizer's template writes it."""
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        cut = [self._fit(context, continuation) for _, context, continuation in requests]
        found = score(
            self.config, self.generator.params, cut, options=self.generator.options,
            batch_tokens=self.batch_tokens, progress=None if disable_tqdm else "log-likelihoods",
        )  # fmt: skip
        answers = [(one.logprob, one.greedy) for one in found]
        for (strings, *_), answer in zip(requests, answers, strict=True):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, answer)
        return answers

    def _fit(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The pair without the oldest tokens that do not fit; at least one is context."""
        over = len(context) + len(continuation) - 1 - self.max_length
        if over <= 0:
            return context, continuation
        context = context[over:] if over < len(context) else context[-1:]
        return context, continuation[-self.max_length :]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts, window after window; every token is predicted once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, owners = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(
                token_list=ids, prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1,
            ):  # fmt: skip
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(windows, disable_tqdm)
        for owner, (logprob, _) in zip(owners, found, strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop string, eos or the request's limit.

        Raises:
          ValueError: a request that asks for what is not offered (beams, top-k ...).
        """
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        samplings = [self._sampling(dict(request.args[1])) for request in requests]
        found = self.generator(
            prompts, samplings, truncate=True, progress=None if disable_tqdm else "generate"
        )
        for request, one in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, one.text)
        return [one.text for one in found]

    def _sampling(self, wanted: dict) -> Sampling:
        until = wanted.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        until.append(self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False))
        sample = wanted.pop("do_sample", None)
        temperature = wanted.pop("temperature", 0.0) or 0.0
        tokens = [wanted.pop(key, None) for key in ("max_gen_toks", "max_new_tokens")]
        top_p = wanted.pop("top_p", 1.0)
        if wanted:
            raise ValueError(
                f"generation with {sorted(wanted)} is not offered: until, do_sample, temperature, "
                "top_p and max_gen_toks are"
            )
        return Sampling(
            max_new_tokens=next((n for n in tokens if n), MAX_NEW_TOKENS),
            temperature=0.0 if sample is False else float(temperature),
            top_p=float(top_p),
            stop=tuple(dict.fromkeys(text for text in until if text)),
        )
