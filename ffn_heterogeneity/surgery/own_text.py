"""Self-generated calibration text, which needs no data."""

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from ffn_heterogeneity.data.packing import Encoder, encode
from ffn_heterogeneity.data.tasks.messages import PROBE, Message, end_of_turn, render
from ffn_heterogeneity.data.templates import TULU
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.causal_lm import require_one_stack
from ffn_heterogeneity.models.generate import Generator
from ffn_heterogeneity.models.sampling import Sampling
from ffn_heterogeneity.wording import check_choice

OWN, CHAT = WRITTEN = "own", "own_chat"
ANSWER = 256  # maximum tokens per answer
WINDOW = 512  # maximum tokens per row, bos not counted
QUESTION = 128  # maximum tokens per question that a model asks itself
BATCH = 48  # maximum answers per batch
RUN, REPEATS = 4, 0.2  # tokens; the share of repeated runs from which on there is a warning
MORE = 1.25  # start this many times the needed answers, since some end early
_log = logging.getLogger(__name__)


def own_rows(model: Model, tokens: int, seed: int = 0, form: str = OWN) -> list[np.ndarray]:
    """Sample rows of token ids at temperature 1, bos first, with `tokens` other tokens in all.

    "own": the model continues bos. (Self-calibration: Williams et al., 2024, for quantization and
    for pruning weights.) "own_chat": it continues the chat template up to the user's message, then
    up to the assistant's, so it asks and answers. (Magpie: Xu et al., 2024, for training data; for
    calibration ours.) An answer ends with eos or after 256 tokens, a question after 128; the last
    row is cut to reach the exact number. The same seed gives the same text on the same kind of
    machine. A text that repeats itself is a poor sample [ours]: a warning says so.

    Raises:
      ValueError: an encoder, a model without bos, or a model that ends every answer immediately;
        "own_chat": no chat template, or one that leaves no place for a question.
    """
    config, named = model.config, f"calibration={form!r}: {model.source}"
    check_choice("calibration", form, WRITTEN)
    if not config.lm_head:
        what = "an encoder" if config.is_encoder else "a classifier"
        raise ValueError(f"{named} is {what} and writes nothing: give a text file")
    require_one_stack(config, "self-generated calibration text")
    if config.bos_id is None:
        raise ValueError(f"{named} has no bos token to begin with: give a text file")
    chat = _Chat.of(model, named) if form == CHAT else None
    length = min(ANSWER, config.max_position - 1)
    size = min(BATCH, math.ceil(MORE * tokens / length))
    write = Generator(config, model.params, model.tokenizer if chat else None, batch_size=size)
    rows, left = [], tokens
    while left > 0:
        # Each round uses new random numbers.
        own_seed = int(np.random.default_rng([seed, len(rows)]).integers(1 << 31))
        prompts = chat.ask(write, own_seed + 1) if chat else [[config.bos_id]] * size
        if chat:
            length = min(ANSWER, chat.room - max(map(len, prompts)))
        ends = chat.ends if chat else ()
        drawn = Sampling(max_new_tokens=length, temperature=1.0, seed=own_seed, eos=ends)
        answers = [one.tokens for one in write(prompts, drawn, progress="the model's own text")]
        if not any(answers):
            raise ValueError(f"{named} ends every answer at once: give a text file")
        for prompt, answer in zip(prompts, answers, strict=True):
            if left > 0 and answer:
                rows.append(np.asarray([*prompt, *answer][: left + 1], np.int32))
                left -= len(rows[-1]) - 1
    opening = len(chat.opening) - 1 if chat else 0  # the same text in each row
    if (share := repeated([row[opening:] for row in rows])) > REPEATS:
        _log.warning(
            "%s repeats itself: %.0f%% of the runs of %d tokens occurred before in the same "
            "answer (SmolLM2 2%%, Gemma 3 7%%). A varied text may serve better: give "
            "calibration=<text>",
            model.source,
            100 * share,
            RUN,
        )
    return rows


class _Chat(NamedTuple):
    """A chat template as ids: what stands before the user's message, and from there to the answer.

    `ends` are tokens that end a message; `header` ends a question where the template ends it with
    ordinary text ("[/INST]"). `question` is the maximum number of a question's tokens, `room` that
    of a row's.
    """

    encoder: Encoder
    opening: list[int]
    reply: list[int]
    ends: tuple[int, ...]
    header: tuple[str, ...]
    question: int
    room: int

    @classmethod
    def of(cls, model: Model, named: str) -> Self:
        tokenizer, bos = model.tokenizer, model.config.bos_id
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(f"{named} has no chat template: give {OWN} or a text file")
        encoder = Encoder(tokenizer, chat_template="tokenizer")
        try:
            text = render([Message("user", PROBE)], encoder, answer=True)
        except ValueError as error:
            why = str(error).removesuffix(f"; {TULU}")
            raise ValueError(f"{named}: {why}; give {OWN} or a text file") from None
        before, _, after = text.partition(PROBE)
        opening, reply = encode(tokenizer, before), _behind(encoder, after)
        opening = opening if opening[:1] == [bos] else [bos, *opening]
        room = min(WINDOW + 1, model.config.max_position)
        question = min(QUESTION, (room - len(opening) - len(reply)) // 2)
        if question < 1 or not reply or PROBE in after:
            raise ValueError(
                f"{named}: its chat template has no place for a question: it writes {text!r:.200} "
                f"of at most {room} tokens; give {OWN} or a text file"
            )
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        header = () if reply[0] in special else (after.strip(),)
        ends = {*model.config.stop_ids, *({reply[0]} & special), end_of_turn(encoder)} - {None}
        return cls(encoder, opening, reply, tuple(sorted(ends)), header, question, room)

    def ask(self, write: Generator, seed: int) -> list[list[int]]:
        """Prompts for answers, each with a question that the model wrote."""
        drawn = Sampling(self.question, 1.0, seed=seed, stop=self.header, eos=self.ends)
        openings, asked = [self.opening] * write.batch_size, []
        for one in write(openings, drawn, progress="the model's own questions"):
            ids = one.tokens[: len(one.tokens) - (one.finish == "eos")]
            if one.finish == "stop":  # its tokens are the header's, too
                ids = _behind(self.encoder, one.text.rstrip())[: self.question]
            asked.append([*self.opening, *ids, *self.reply])
        return asked


def _behind(encoder: Encoder, text: str) -> list[int]:
    """Ids of a text behind another."""
    ids = encoder.continuation(text)
    return encode(encoder.tokenizer, text) if ids is None else ids


def repeated(rows: Sequence[np.ndarray]) -> float:
    """Share of the runs of `RUN` tokens that occurred before in their row (bos left out)."""
    runs, distinct = 0, 0
    for row in rows:
        found = [tuple(row[i : i + RUN].tolist()) for i in range(1, len(row) - RUN + 1)]
        runs, distinct = runs + len(found), distinct + len({*found})
    return 1 - distinct / runs if runs else 0.0
