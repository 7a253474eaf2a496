"""Our models as a language model of lm-evaluation-harness (extra `eval`); torch is not needed."""

from collections.abc import Sequence
from typing import Any

from ffn_heterogeneity.data.templates import render_template
from ffn_heterogeneity.evaluate.inputs import tokenizer_of
from ffn_heterogeneity.evaluate.scoring import score
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.causal_lm import RunOptions
from ffn_heterogeneity.models.generate import Generator, Sampling
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.wording import extra

with extra("eval"):
    from lm_eval.api.model import TemplateLM

MAX_NEW_TOKENS = 256


class HarnessLM(TemplateLM):
    """A model for `lm_eval.simple_evaluate(model=HarnessLM(...))`.

    Tokens are made as the harness's own `hf` model makes them: the tokenizer's rule says whether a
    bos is put first, a text that already begins with one gets no second, trailing spaces of a
    context belong to its continuation, and a context without tokens is the bos (or eos) alone.
    Two exceptions: a prompt too long to be continued keeps its bos, and one of a task that says so
    (LongBench's) loses its middle instead of its beginning.

    Args:
      model: from `io.load.load_model`; with a tokenizer.
      options: how to compute.
      batch_size: rows of a batch of generation.
      batch_tokens: tokens of a batch of scoring.
      max_length: longest input, of generation with what is generated; None: the model's positions.
      add_bos: None: as the tokenizer does; or True, False.
      stop: strings that end every text, beside those of its request.

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
        stop: Sequence[str] = (),
    ):
        super().__init__()
        self.tokenizer = tokenizer_of(model, "tasks are text, add its files")
        self.config = model.config
        self.max_length = max_length or model.config.max_position
        self.add_bos, self.batch_tokens, self.stop = add_bos, batch_tokens, stop
        self.generator = Generator(
            model.config, model.params, model.tokenizer, options=options, batch_size=batch_size
        )

    @property
    def eot_token_id(self) -> int | None:
        """The config's (first) eos, else the tokenizer's; None: neither has one."""
        own = self.config.eos_id if isinstance(self.config.eos_id, tuple) else (self.config.eos_id,)
        return next((i for i in (*own, self.tokenizer.eos_token_id) if i is not None), None)

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        for found in (self.tokenizer.bos_token_id, self.eot_token_id):
            if found is not None:
                return found
        raise ValueError(
            "a text without a context needs a token before it, and the tokenizer has neither bos "
            "nor eos: name one in its tokenizer_config.json (bos_token), or leave the task out"
        )

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
        return render_template(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log p of a continuation after its context, whether greedy decoding writes it) of each.

        Raises:
          ValueError: a continuation without tokens, or a context without and no token for it.
        """
        shown = bar("" if disable_tqdm else "encode", requests)
        pairs = [(request.args, *self._encode_pair(*request.args)) for request in shown]
        return self._loglikelihood_tokens(pairs, disable_tqdm)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context:
            before, ids = super()._encode_pair(context, continuation)
        else:
            before, ids = [], self.tok_encode(continuation, add_special_tokens=False)
        if not before:
            # Also of white space alone, which belongs to the continuation.
            before = [self.prefix_token_id]
            ids = ids[1:] if ids[:1] == before else ids
        if not ids:
            raise ValueError(
                f"the answer {continuation!r:.60} after {context[-60:]!r} adds no token to it, so "
                "it has no probability: mend this row of the task's file, or leave it out"
            )
        return before, ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        cut = [self._fit(context, continuation) for _, context, continuation in requests]
        params, options = self.generator.params, self.generator.options
        size = self.batch_tokens
        label = None if disable_tqdm else "log-likelihoods"
        scores = score(self.config, params, cut, options=options, batch_tokens=size, progress=label)
        answers = [(one.logprob, one.greedy) for one in scores]
        for request, answer in zip(requests, answers, strict=True):
            if request[0] is not None:
                self.cache_hook.add_partial("loglikelihood", request[0], answer)
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
            rolling = get_rolling_token_windows(
                ids, self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for window in rolling:
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
          ValueError: a request that asks for what is not offered (beams, top-k ...), or for more
            tokens than `max_length` has room for.
        """
        samplings, prompts = [], []
        for request in requests:
            # A row of LongBench says how long its answer may be, and what a long prompt loses.
            own = {key: request.doc[key] for key in ("max_gen_toks",) if key in request.doc}
            sampling = self._sampling(request.args[1] | own)
            middle = request.doc.get("cut") == "middle"
            prompts.append(self._prompt(request.args[0], sampling.max_new_tokens, middle))
            samplings.append(sampling)
        found = self.generator(
            prompts, samplings, truncate=True, progress=None if disable_tqdm else "generate"
        )
        for request, one in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, one.text)
        return [one.text for one in found]

    def _prompt(self, text: str, new: int, middle: bool = False) -> list[int]:
        """Ids of a text without those that leave no room for `new` tokens.

        Args:
          middle: the first and the last half of what there is room for stay (as LongBench does);
            otherwise the last, and a bos.
        """
        ids = self.tok_encode(text) or [self.prefix_token_id]
        room = self.max_length - new
        if room < 1:
            raise ValueError(
                f"max_length={self.max_length} has no room for a prompt and the {new} new tokens "
                "of the task: raise --config.max_length, or use a model of more positions"
            )
        if len(ids) <= room:
            return ids
        bos = ids[0] == self.tokenizer.bos_token_id and room > 1
        first = (room + 1) // 2 if middle else int(bos)
        return [*ids[:first], *ids[len(ids) - room + first :]]

    def _ends(self, until: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """(stop strings, ids that end a text) of `until` and the model's and tokenizer's eos.

        A special token is not in the decoded text, where it would be looked for in vain.
        """
        decode, stop, eos = self.tokenizer.decode, [], [self.tokenizer.eos_token_id]
        if self.eot_token_id is not None:
            until = [*until, decode([self.eot_token_id], skip_special_tokens=False)]
        for text in filter(None, until):
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            shown = decode(ids, skip_special_tokens=True)
            if len(ids) == 1 and shown != decode(ids, skip_special_tokens=False):
                eos.append(ids[0])
            else:
                stop.append(text)
        return tuple(dict.fromkeys(stop)), tuple(dict.fromkeys(i for i in eos if i is not None))

    def _sampling(self, wanted: dict) -> Sampling:
        until = wanted.pop("until", None) or []
        until = [until] if isinstance(until, str) else until
        stop, eos = self._ends([*until, *self.stop])
        sample = wanted.pop("do_sample", None)
        temperature = wanted.pop("temperature", 0.0) or 0.0
        tokens = [wanted.pop(key, None) for key in ("max_gen_toks", "max_new_tokens")]
        top_p = wanted.pop("top_p", 1.0)
        if wanted:
            raise ValueError(
                f"generation with {sorted(wanted)} is not offered: until, do_sample, temperature, "
                "top_p and max_gen_toks are"
            )
        limit = next((n for n in tokens if n), MAX_NEW_TOKENS)
        if sample is False:
            temperature = 0.0
        return Sampling(limit, float(temperature), float(top_p), stop=stop, eos=eos)
