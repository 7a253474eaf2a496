"""Our models as language models of lm-evaluation-harness (extra `eval`), without PyTorch."""

from collections.abc import Sequence
from typing import Any

from ffn_heterogeneity.data.templates import render_template
from ffn_heterogeneity.evaluate.inputs import tokenizer_of
from ffn_heterogeneity.evaluate.scoring import score
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.causal_lm import RunOptions, require_decoder
from ffn_heterogeneity.models.generate import Generator, Sampling
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.wording import extra

with extra("eval"):
    from lm_eval.api.model import TemplateLM

MAX_NEW_TOKENS = 256


class HarnessLM(TemplateLM):
    """A model for `lm_eval.simple_evaluate(model=HarnessLM(...))`.

    Texts are tokenized as in the harness's `hf` model: the tokenizer's rule decides whether a bos
    is added, a text that already begins with one gets no second, trailing spaces of a context
    belong to its continuation, and an empty context is replaced by bos (or eos). There are two
    exceptions: a truncated prompt keeps its bos, and prompts of some tasks (LongBench's) are cut in
    the middle instead of at the beginning.

    Args:
      model: from `io.load.load_model`; with a tokenizer.
      options: run options.
      batch_size: rows per batch of generation.
      batch_tokens: tokens per batch of scoring.
      max_length: maximum input length, including generated tokens; None: the model's positions.
      add_bos: True or False; None: the tokenizer's rule.
      stop: strings that end every text, in addition to those of its request.

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
        require_decoder(model.config, "scoring of tasks")
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
        ids = self.config.eos_id if isinstance(self.config.eos_id, tuple) else (self.config.eos_id,)
        return next((i for i in (*ids, self.tokenizer.eos_token_id) if i is not None), None)

    @property
    def prefix_token_id(self) -> int:
        """The token that replaces an empty context."""
        for token in (self.tokenizer.bos_token_id, self.eot_token_id):
            if token is not None:
                return token
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
        """Ids of a text; with `add_special_tokens` None, a bos is added by the rule above."""
        add = self.add_bos if add_special_tokens is None else add_special_tokens
        bos = self.tokenizer.bos_token
        if add_special_tokens is None and bos and string.startswith(bos):
            add = False
        # The tokenizer's rule, which is not always True.
        arguments = {} if add is None else {"add_special_tokens": add}
        ids, first = list(self.tokenizer.encode(string, **arguments)), self.tokenizer.bos_token_id
        if add_special_tokens is None and add and first is None:
            raise ValueError("add_bos='always': this tokenizer has no bos token")
        # Many tokenizers add none by themselves.
        return [first, *ids] if add_special_tokens is None and add and ids[:1] != [first] else ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render the conversation with the tokenizer's chat template."""
        return render_template(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log p of the continuation given the context, whether it is greedy) of each request.

        Raises:
          ValueError: a continuation without tokens, or an empty context that cannot be replaced.
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
            # Also for a context of only white space, which belongs to the continuation.
            before = [self.prefix_token_id]
            ids = ids[1:] if ids[:1] == before else ids
        if not ids:
            raise ValueError(
                f"the answer {continuation!r:.60} after {context[-60:]!r} adds no token to it, so "
                "it has no probability: fix this row of the task's file, or leave it out"
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
        """Remove the oldest tokens that do not fit; at least one context token remains, and a bos
        before others."""
        over = len(context) + len(continuation) - 1 - self.max_length
        if over <= 0:
            return context, continuation
        kept = max(len(context) - over, 1)
        bos = context[:1] if kept > 1 and context[0] == self.tokenizer.bos_token_id else []
        return bos + context[len(bos) - kept :], continuation[-self.max_length :]

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """log p of whole texts, window by window; every token is predicted once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, owners = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            ids = ids[1:] if ids[:1] == [self.prefix_token_id] else ids  # it stands before them
            rolling = get_rolling_token_windows(
                ids, self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for window in rolling:
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for owner, (logprob, _) in zip(owners, scores, strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Generate continuations up to a stop string, eos or the request's limit.

        Raises:
          ValueError: a request for an unsupported option (beams, top-k ...), or for more tokens
            than `max_length` allows.
        """
        samplings, prompts = [], []
        for request in requests:
            # LongBench's rows have the maximum answer length and the part of the prompt to cut.
            row_options = {key: request.doc[key] for key in ("max_gen_toks",) if key in request.doc}
            sampling = self._sampling(request.args[1] | row_options)
            middle = request.doc.get("cut") == "middle"
            prompts.append(self._prompt(request.args[0], sampling.max_new_tokens, middle))
            samplings.append(sampling)
        generations = self.generator(
            prompts, samplings, truncate=True, progress=None if disable_tqdm else "generate"
        )
        for request, one in zip(requests, generations, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, one.text)
        return [one.text for one in generations]

    def _prompt(self, text: str, new: int, middle: bool = False) -> list[int]:
        """Ids of a text, cut to leave room for `new` tokens.

        Args:
          middle: cut the middle (as LongBench does); otherwise cut the beginning and keep a bos.
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
        """(stop strings, ids that end a text) from `until` and the model's and tokenizer's eos.

        Special tokens must be ids, because they do not appear in the decoded text.
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
                f"generation with {sorted(wanted)} is not supported: use until, do_sample, "
                "temperature, top_p and max_gen_toks"
            )
        limit = next((n for n in tokens if n), MAX_NEW_TOKENS)
        if sample is False:
            temperature = 0.0
        return Sampling(limit, float(temperature), float(top_p), stop=stop, eos=eos)
