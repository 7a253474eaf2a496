"""The calls of `cases.time_model` with PyTorch's `transformers`, same weights (extra `parity`)."""

import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.models.config import ModelConfig

COMPILED = "torch.compile"
PEERS = ("transformers", COMPILED)  # unchanged, or compiled (except generation)
# For both sides: AdamW's learning rate; prompt and new tokens per row of generation.
LEARNING_RATE, PROMPT, NEW = 1e-6, 64, 32


class Torch:
    """PyTorch with its default attention and fused AdamW, and autocast for bfloat16.

    For generation the weights are in bfloat16, because autocast would cast them at every token. It
    runs on a GPU if JAX does; `XLA_PYTHON_CLIENT_PREALLOCATE=false` leaves memory for PyTorch.

    Raises:
      ValueError: JAX uses a GPU that this PyTorch cannot use.
    """

    def __init__(self, model: ModelConfig, params: dict, batch: int, peer: str = PEERS[0]):
        import torch  # pyright: ignore[reportMissingImports]
        import transformers

        self.device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"peer={peer!r}: JAX computes on a GPU, and torch {torch.__version__} cannot: "
                "install torch with CUDA, or set JAX_PLATFORMS=cpu"
            )

        with tempfile.TemporaryDirectory() as directory:
            save_pretrained(model, params, f"{directory}/model")
            name = "Seq2SeqLM" if model.kind == "encoder_decoder" else "CausalLM"
            loader, path = getattr(transformers, f"AutoModelFor{name}"), f"{directory}/model"
            load = loader.from_pretrained
            names = ("float32", "bfloat16")
            self.models = {name: load(path, dtype=name).to(self.device) for name in names}
        self.model, self.batch = self.models["float32"], batch
        parameters = self.model.parameters()
        self.logits = torch.compile(self._logits) if peer == COMPILED else self._logits
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def about(self) -> dict[str, Any]:
        """Settings that the results depend on."""
        import torch  # pyright: ignore[reportMissingImports]

        blas = next(s for s in torch.__config__.show().split(", ") if "BLAS_INFO" in s)
        return {
            "torch": torch.__version__,
            "torch threads": torch.get_num_threads(),
            "torch BLAS": blas.split("=")[-1],
            "torch attention": self.model.config._attn_implementation,
        }

    def call(self, name: str, dtype: str, rows: Any) -> Callable[[], Any]:
        """The counterpart of `cases.Ours.call`."""
        import torch  # pyright: ignore[reportMissingImports]

        tokens = jax.tree.map(lambda x: torch.tensor(x.astype(np.int64), device=self.device), rows)
        if name.startswith("generate"):
            return lambda: self._generate(self.models[dtype], tokens)
        functions = {"forward": self._forward, "train step": self._step}
        function = (functions | {"perplexity": self._perplexity})[name]
        training, half = name == "train step", dtype == "bfloat16"

        def call():
            with (
                torch.set_grad_enabled(training),
                torch.autocast(self.device, dtype=torch.bfloat16, enabled=half),
            ):
                result = function(tokens)
            if self.device == "cuda":
                torch.cuda.synchronize()
            return result

        return call

    def _forward(self, batch):
        if "encoder_tokens" in batch:
            return self.logits(batch["encoder_tokens"], decoder_input_ids=batch["tokens"])
        return self.logits(batch["tokens"])

    def _logits(self, tokens, **more):
        return self.model(input_ids=tokens, use_cache=False, **more).logits

    def _loss(self, batch):
        from torch.nn.functional import cross_entropy  # pyright: ignore[reportMissingImports]

        return cross_entropy(self._forward(batch).flatten(0, 1), batch["targets"].flatten())

    def _step(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _perplexity(self, rows):
        batches = [{"tokens": x[:, :-1], "targets": x[:, 1:]} for x in rows.split(self.batch)]
        losses = [self._loss(batch).item() for batch in batches]
        return np.exp(np.mean(losses))

    def _generate(self, model, rows):
        length = {"max_new_tokens": NEW, "min_new_tokens": NEW}
        greedy = {"do_sample": False, "pad_token_id": 0}
        return model.generate(rows, attention_mask=rows >= 0, **length, **greedy).cpu()
