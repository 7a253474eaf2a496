"""Converts any readable model into a Hugging Face directory of safetensors.

Example:
  python scripts/convert.py --model=smollm2.gguf --output=smollm2 --dtype=bfloat16

`--model` is a directory, a .gguf file, a preset (gemma2_2b) or a hub id (google/gemma-2-2b).
`--export=padded` pads FFNs of unequal width with zero neurons so that transformers reads them.
"""

from __future__ import annotations

from absl import flags

from ffn_heterogeneity.io.export import EXPORTS, save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import cli
from ffn_heterogeneity.models.families import count_parameters

_MODEL = flags.DEFINE_string("model", None, "Directory, .gguf, preset or hub id.", required=True)
_REVISION = flags.DEFINE_string("revision", None, "Branch, tag or commit of a hub id.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory to write.", required=True)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16", "float16"], "Type of the weights; default: as stored."
)
_EXPORT = flags.DEFINE_enum("export", "auto", EXPORTS, "Form of the checkpoint.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace an existing directory.")


def main() -> None:
    model = load_model(_MODEL.value, revision=_REVISION.value, dtype=_DTYPE.value)
    directory = save_pretrained(
        model.config,
        model.params,
        _OUTPUT.value,
        tokenizer=model.tokenizer,
        export=_EXPORT.value,
        overwrite=_OVERWRITE.value,
    )
    total = count_parameters(model.config)["total"]
    print(f"{model.source} -> {directory}: {model.config.family}, {total:,} parameters")


if __name__ == "__main__":
    cli.launch_flags(main)
