"""The calls of `bench.model` by torch `transformers`, on the same weights (extra `parity`)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from ffn_heterogeneity.io.export import save_pretrained
from ffn_heterogeneity.models.config import ModelConfig


class Torch:
    """torch with its default attention and fused AdamW, in bfloat16 by autocast.

    But for generation, whose weights are in bfloat16: autocast would cast them at every token.
    """

    def __init__(
        self, model: ModelConfig, params: dict, *, batch: int, new: int, learning_rate: float
    ):
        import torch  # pyright: ignore[reportMissingImports]
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory() as directory:
            save_pretrained(model, params, f"{directory}/model")
            load, path = AutoModelForCausalLM.from_pretrained, f"{directory}/model"
            self.models = {name: load(path, dtype=name) for name in ("float32", "bfloat16")}
        self.model, self.batch, self.new = self.models["float32"], batch, new
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=learning_rate, fused=True)

    def about(self) -> dict[str, Any]:
        """Facts that the figures depend on."""
        import torch  # pyright: ignore[reportMissingImports]

        blas = next(s for s in torch.__config__.show().split(", ") if "BLAS_INFO" in s)
        return {
            "torch": torch.__version__,
            "torch threads": torch.get_num_threads(),
            "torch BLAS": blas.split("=")[-1],
            "torch attention": self.model.config._attn_implementation,
        }

    def call(self, name: str, dtype: str, rows: np.ndarray) -> Callable[[], Any]:
        """The counterpart of `bench.model.Ours.call`."""
        import torch  # pyright: ignore[reportMissingImports]

        tokens = torch.tensor(rows.astype(np.int64))
        if name.startswith("generate"):
            return lambda: self._generate(self.models[dtype], tokens)
        functions = {"forward": self._forward, "train step": self._step}
        function = (functions | {"perplexity": self._perplexity})[name]
        training, half = name == "train step", dtype == "bfloat16"

        def call():
            with (
                torch.set_grad_enabled(training),
                torch.autocast("cpu", dtype=torch.bfloat16, enabled=half),
            ):
                return function(tokens)

        return call

    def _forward(self, rows):
        return self.model(input_ids=rows[:, :-1], use_cache=False).logits

    def _loss(self, rows):
        from torch.nn.functional import cross_entropy  # pyright: ignore[reportMissingImports]

        return cross_entropy(self._forward(rows).flatten(0, 1), rows[:, 1:].flatten())

    def _step(self, rows):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(rows)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _perplexity(self, rows):
        losses = [self._loss(part).item() for part in rows.split(self.batch)]
        return np.exp(np.mean(losses))

    def _generate(self, model, rows):
        length = {"max_new_tokens": self.new, "min_new_tokens": self.new}
        greedy = {"do_sample": False, "pad_token_id": 0}
        return model.generate(rows, attention_mask=rows >= 0, **length, **greedy)
