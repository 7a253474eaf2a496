"""Settings of one layer: feed-forward block or experts, window, rotary embedding."""

import dataclasses
from typing import Any

from ffn_heterogeneity.wording import check_choice, check_number

FFN_KINDS = ("gated", "plain")
NORM_PLACEMENTS = ("pre", "post")
GATES = ("renormalized", "softmax", "none")
ROUTERS = ("linear", "mlp")
OVERFLOWS = ("zero", "input")


class ConfigError(ValueError):
    """An invalid model configuration; the message names the field and value."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer.

    Attributes:
      theta: base of the inverse frequencies, theta ** (-2i / head_dim).
      linear_factor: positions are divided by it (1.0: none).
      llama3: `(factor, low_freq_factor, high_freq_factor, original_max_position)` of Llama 3.1's
        frequency-dependent scaling, or None.
      fraction: fraction of each head's dimensions, from its beginning, that is rotated (GPT-NeoX:
        0.25); the frequencies are then theta ** (-2i / rotated).
    """

    theta: float = 10_000.0
    linear_factor: float = 1.0
    llama3: tuple[float, float, float, int] | None = None
    fraction: float = 1.0

    def rotated(self, head_dim: int) -> int:
        """The number of `head_dim` dimensions that are rotated."""
        return int(head_dim * self.fraction)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The settings that may differ from layer to layer.

    Attributes:
      ffn_width: m, the number of inner neurons of the feed-forward block.
      ffn_kind: "gated" (act(x G) * (x U)) W, or "plain" act(x U) W.
      window: sliding-window size: position t sees t - window < s <= t; None sees all s <= t.
      rope: the layer's rotary embedding, or None.
      causal: False: position t also sees later positions, with a window those with |t - s| <
        window.
      norm_placement: "pre", x + f(norm(x)), or "post", norm(x + f(x)), for attention and FFN. (A
        layer's setting, because Mix-LN has both in one model.)
      experts: E, the number of stored feed-forward blocks, equally wide; None: one, without a
        router. The fields below have no meaning then.
      top_k: number of router columns that each token is sent to.
      gates: the factor of an expert's output: its probability divided by the sum of the chosen
        ones ("renormalized"), its probability ("softmax"), or 1 ("none").
      shared: the first `shared` of the E experts have no router column and see every token, with
        gate 1.
      routes: R, the number of router columns; None: one for each expert that is not shared. Other
        numbers need the leaf `ffn/expert_of`, the expert of each column (merged experts).
      router: "linear", x R, or "mlp", tanh(x A / |x|) R (Moefication).
      capacity: the number of choices in a row that each router column accepts, in the order of the
        row, padding included; later ones are dropped (Switch). None: all.
      overflow: the output for a dropped choice: 0 ("zero"), or the gate times the layer's input
        ("input", as in the published code of MLP Fusion).
      jitter: in training the router's input is multiplied by random numbers between 1 - jitter and
        1 + jitter.
      cross_attention: a second attention, on the encoder's states, between attention and FFN.
      constants: the router's last columns that have the leaf `ffn/constant`, a vector each, in
        place of an expert (MoNE).
    """

    ffn_width: int
    ffn_kind: str = "gated"
    window: int | None = None
    rope: RopeConfig | None = RopeConfig()
    causal: bool = True
    norm_placement: str = "pre"
    experts: int | None = None
    top_k: int = 2
    gates: str = "renormalized"
    shared: int = 0
    routes: int | None = None
    router: str = "linear"
    constants: int = 0
    capacity: int | None = None
    overflow: str = "zero"
    jitter: float = 0.0
    cross_attention: bool = False

    @property
    def columns(self) -> int:
        """R, the number of the router's columns; 0 without experts."""
        if self.experts is None:
            return 0
        return self.routes or self.experts - self.shared + self.constants

    @property
    def read_share(self) -> float:
        """The share of the experts' parameters that a token is multiplied by."""
        return 1.0 if self.experts is None else min(1.0, (self.top_k + self.shared) / self.experts)

    def check(self, where: str) -> None:
        """Check the values; `where` names the layer in errors.

        Raises:
          ConfigError: a value that no layer can have.
        """
        check_choice(f"{where}: ffn_kind", self.ffn_kind, FFN_KINDS, ConfigError)
        check_choice(f"{where}: norm_placement", self.norm_placement, NORM_PLACEMENTS, ConfigError)
        check_count(f"{where}: ffn_width", self.ffn_width, 1)
        for name in ("window", "experts", "routes", "capacity"):
            if (value := getattr(self, name)) is not None:
                check_count(f"{where}: {name}", value, 1)
        if self.experts is None:
            return
        check_count(f"{where}: shared", self.shared, 0)
        check_count(f"{where}: constants", self.constants, 0)
        check_count(f"{where}: top_k", self.top_k, 1)
        check_choice(f"{where}: gates", self.gates, GATES, ConfigError)
        check_choice(f"{where}: router", self.router, ROUTERS, ConfigError)
        check_choice(f"{where}: overflow", self.overflow, OVERFLOWS, ConfigError)
        check_number(f"{where}: jitter", self.jitter, "[0, 1)", ConfigError)
        if self.top_k > self.columns:
            raise ConfigError(
                f"{where}: top_k={self.top_k} is more than the router's {self.columns} columns "
                f"(experts={self.experts}, shared={self.shared}, routes={self.routes})"
            )
        if self.constants and self.routes:
            raise ConfigError(
                f"{where}: constants={self.constants} of merged experts (routes={self.routes}) are "
                "not supported"
            )


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Check that a value is a count that an array's axis can have."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
        kind = "is not a positive whole number" if least else "must be an integer from 0 on"
        raise ConfigError(f"{name}={value!r:.60} {kind}, below 2^31")
