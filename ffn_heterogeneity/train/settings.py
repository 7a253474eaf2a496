"""A training experiment as a frozen config, read from its ConfigDict and checked once.

All other code uses this config, so that a key has one meaning and is read in one place.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from ffn_heterogeneity.adapters import RATES, REFRESHES
from ffn_heterogeneity.data.labelled import steps_of
from ffn_heterogeneity.losses.terms import weights_of
from ffn_heterogeneity.models.options import COMPUTE_DTYPES
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.train.build import OBJECTIVES
from ffn_heterogeneity.train.loop import LoopConfig
from ffn_heterogeneity.train.objectives import LANGUAGE, ObjectiveSettings
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_schedule
from ffn_heterogeneity.train.profiler import parse_window
from ffn_heterogeneity.train.source import Start
from ffn_heterogeneity.wording import check_choice, check_number, check_numbers, settings_from

MOST = 2**31 - 1  # rows, tokens per row, steps: counters are int32
EXPORT_DTYPES = ("float32", "bfloat16", "float16")
SCHEDULE_KEYS = ("learning_rate", "schedule", "warmup_steps", "final_fraction")
# Fields that no compiled program depends on: they are passed in `hyper`, or used on the host only.
# (The dropout rate is one of them, but not whether there is dropout; likewise losses' weights.)
FREE = (
    "model",
    "revision",
    "tokenizer",
    "seed",
    "mesh",
    "dropout",
    "schedule",
    "losses",
    "eval_every",
    "max_batches",
    "best_metric",
    "loop",
    "export",
    "dry_run",
    "retries",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training experiment; `configs/parts/train.py` documents each key of its config.

    Attributes:
      losses, monitors: name of an instance -> its group.
      schedule: the keys of `config.optimizer` for the learning-rate schedule.
      eval_every, max_batches: from `config.eval`; None: all batches of a held-out set.
      best_metric: "" if the objective decides.
      loop: the loop's schedule; its metric is the default until the objective is known.
      prepare, refresh: name -> settings, in the order in which they apply.
      retries: further attempts, with other seeds, after a non-finite loss.
      own: keys and groups of the objective.
    """

    model: str
    revision: str | None
    tokenizer: str = ""
    shape: Mapping[str, Any] | None = None
    seed: int
    objective: str = LANGUAGE
    data: Mapping[str, Any]
    batch_size: int
    accumulation: int
    seq_len: int = 0
    losses: Mapping[str, Mapping[str, Any]]
    monitors: Mapping[str, Mapping[str, Any]]
    dropout: float
    optimizer: OptimizerConfig
    schedule: Mapping[str, Any]
    freeze: tuple[str, ...]
    train_only: tuple[str, ...]
    mesh: Mapping[str, int]
    compute_dtype: str
    remat: str
    unroll: int
    eval_every: int
    max_batches: int | None
    best_metric: str
    loop: LoopConfig
    export: Mapping[str, str]
    prepare: Mapping[str, Mapping[str, Any]]
    refresh: Mapping[str, Mapping[str, Any]]
    dry_run: str
    retries: int = 0
    own: Mapping[str, Any]

    def __post_init__(self):
        if not self.model and self.shape is None:
            raise ValueError("model is empty: give a directory, a .gguf file, a hub id or a preset")
        for key, value, choices in (
            ("objective", self.objective, tuple(OBJECTIVES)),
            ("compute_dtype", self.compute_dtype, COMPUTE_DTYPES),
            ("export.dtype", self.export["dtype"], EXPORT_DTYPES),
            ("export.form", self.export["form"], ("auto", "padded", "native")),
            ("export.weights", self.export["weights"], ("last", "best")),
        ):
            check_choice(key, value, choices)
        check_numbers(self, dropout="[0, 1)", seed=f"[0, {2**63})", seq_len=f"[0, {MOST}]")
        check_numbers(self, batch_size=f"[1, {MOST}]", accumulation=f"[1, {MOST}]")
        check_number("steps", self.loop.steps, f"[0, {MOST}]")
        check_number("eval.every", self.eval_every, f"[0, {MOST}]")
        for name, settings in self.prepare.items():
            abstract = tuple(key for key, surgery in SURGERIES.items() if surgery.abstract)
            check_choice("prepare", name, abstract)
            SURGERIES[name].check(settings)
        for name in self.refresh:
            check_choice("refresh", name, tuple(REFRESHES))
        self.hyper({})
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of "
                f"accumulation={self.accumulation}"
            )
        window = self.loop.profile
        if window and window[1] > self.loop.steps + 1:
            shown = f"{window[0]}:{window[1]}"
            raise ValueError(f"profile={shown!r}: the run has steps 1 to {self.loop.steps}")
        if self.export["weights"] == "best" and not self.loop.keep_best:
            raise ValueError("export.weights='best' needs checkpoint.keep_best=True")

    @property
    def adapter_dropout(self) -> float:
        """The dropout rate of the prepared adapters, or 0."""
        rates = [settings.get("dropout", 0.0) for settings in self.prepare.values()]
        return max(rates, default=0.0)

    def losses_with(self, brought: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The groups of losses, with the objective's defaults that the config does not name.

        (Not stored, because runs with equal programs differ in their weights.)
        """
        return {**brought, **self.losses}

    def optimizer_with(self, rates: Sequence[tuple[str, float]]) -> OptimizerConfig:
        """The optimizer with the leaves' peak learning rates, as factors of the run's."""
        peak = self.schedule["learning_rate"]
        if rates and not peak:
            raise ValueError(
                f"learning_rate=0 with another rate for {rates[0][0]!r}: to train only these "
                "leaves, name them in train_only and give learning_rate"
            )
        factors = tuple((pattern, rate / peak) for pattern, rate in rates)
        return dataclasses.replace(self.optimizer, rates=(*factors, *self.optimizer.rates))

    @property
    def source(self) -> Start:
        """The model that the run starts from."""
        return settings_from(Start, vars(self))

    @property
    def task(self) -> ObjectiveSettings:
        """The part of the config that the objective gets."""
        return settings_from(ObjectiveSettings, vars(self))

    def hyper(self, brought: Mapping[str, Mapping[str, Any]]) -> Callable[[int], dict[str, float]]:
        """step (0-based) -> {"learning_rate", "dropout", the losses' weights, refreshes' rates}.

        Args:
          brought: `Objective.terms`.
        """
        steps, schedule = self.loop.steps, dict(self.schedule)
        rate = make_schedule(
            schedule.pop("schedule"), schedule.pop("learning_rate"), total_steps=steps, **schedule
        )
        constant = {"dropout": self.dropout} | weights_of(self.losses_with(brought))
        rates = {
            name: RATES[name](settings, steps)
            for name, settings in self.refresh.items()
            if name in RATES
        }

        def hyper(step: int) -> dict[str, float]:
            changing = {name: rate_at(step) for name, rate_at in rates.items()}
            return {"learning_rate": rate(step), **constant, **changing}

        return hyper

    @property
    def static(self) -> Hashable:
        """The settings that programs depend on, except the model, its leaves and the mesh.

        Configs that differ only in `FREE` fields can use the same programs.
        """
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in FREE
        }
        losses = {
            name: {key: value for key, value in group.items() if key != "weight"}
            for name, group in self.losses.items()
            if group["weight"] is not None
        }
        return repr((values, losses, self.dropout > 0))


def read(config: ConfigDict) -> TrainConfig:
    """Read and check the experiment that `config` describes.

    Raises:
      ValueError: an invalid value; names the key, the value and the allowed values.
    """
    values = config.to_dict()
    values["steps"] = _steps(values)
    optimizer, schedule = values.pop("optimizer"), {}
    for key in SCHEDULE_KEYS:
        schedule[key] = optimizer.pop(key)
    evaluation, checkpoint = values.pop("eval"), values.pop("checkpoint")
    loop = LoopConfig(
        steps=values.pop("steps"),
        checkpoint_every=checkpoint["every"],
        accumulation=values["accumulation"],
        keep=checkpoint["keep"],
        keep_best=checkpoint["keep_best"],
        save_at_end=checkpoint["at_end"],
        profile=parse_window(values.pop("profile")),
        tensorboard=values.pop("tensorboard"),
        wandb=values.pop("wandb"),
    )
    values.pop("seeds", None)
    prepare, refresh = values.pop("prepare", ()), values.pop("refresh", ())
    groups = {name: values.pop(name, {}) for name in {*prepare, *refresh}}
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    options = {key: values.pop(key) for key in sorted(set(values) - known)}
    return TrainConfig(
        **values,
        prepare={name: groups[name] for name in prepare},
        refresh={name: groups[name] for name in refresh},
        optimizer=OptimizerConfig(**optimizer),
        schedule=schedule,
        eval_every=evaluation["every"],
        max_batches=evaluation["max_batches"] or None,
        best_metric=evaluation["best_metric"],
        loop=loop,
        own=options,
    )


def _steps(values: Mapping[str, Any]) -> int:
    """Steps of the run; if not given, those of its epochs."""
    if values["steps"] or "epochs" not in values:
        return values["steps"]
    steps = steps_of(values["data"], values["epochs"], values["batch_size"])
    return max(steps, values.get("least_steps", 0))
