"""Converts any readable model into a Hugging Face directory of safetensors, or a GGUF file.

Example:
  python scripts/convert.py --model=smollm2.gguf --output=smollm2 --dtype=bfloat16
  python scripts/convert.py --model=runs/pruned/model --output=pruned.gguf --type=q8_0

`--model` is a directory, a .gguf file, a preset (gemma2_2b) or a hub id (google/gemma-2-2b).
FFNs of unequal width: `--export=padded` adds zero neurons, so that transformers reads them; `deci`
is NVIDIA's `block_configs`. `--push=<owner>/<name>` uploads it. `--peft=<base>`: adapters alone.
"""

from __future__ import annotations

from absl import flags

from ffn_heterogeneity.io.card import check_repository, push
from ffn_heterogeneity.io.export import EXPORTS, loads_in, save_pretrained
from ffn_heterogeneity.io.gguf_export import TYPES, save_gguf
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.io.peft import save_adapters
from ffn_heterogeneity.launch import cli
from ffn_heterogeneity.models.families import count_parameters

_MODEL = flags.DEFINE_string("model", None, "Directory, .gguf, preset or hub id.", required=True)
_REVISION = flags.DEFINE_string("revision", None, "Branch, tag or commit of a hub id.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory or .gguf to write.", required=True)
_PUSH = flags.DEFINE_string("push", "", "<owner>/<name>: to the Hugging Face hub, too.")
_TYPE = flags.DEFINE_enum("type", "f16", tuple(TYPES), "Of a .gguf file's matrices.")
_TOKENIZER = flags.DEFINE_bool("tokenizer", True, "With the tokenizer.")
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16", "float16"], "Type of the weights; default: as stored."
)
_EXPORT = flags.DEFINE_enum("export", "auto", EXPORTS, "Form of the checkpoint.")
_PEFT = flags.DEFINE_string("peft", "", "The base that PEFT is to find: writes adapters alone.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace an existing directory.")


def main() -> None:
    if _PUSH.value:
        check_repository(_PUSH.value)
    model = load_model(_MODEL.value, revision=_REVISION.value, dtype=_DTYPE.value)
    given, output = (model.config, model.params, _OUTPUT.value), _OUTPUT.value
    tokenizer = model.tokenizer if _TOKENIZER.value else None
    options = {"overwrite": _OVERWRITE.value}
    if _PEFT.value:
        save_adapters(*given, _PEFT.value, **options)
    elif _OUTPUT.value.endswith(".gguf"):
        options |= {"tokenizer": tokenizer, "type": _TYPE.value, "source": model.source}
        output = save_gguf(*given, **options)
    else:
        output = save_pretrained(*given, **options, tokenizer=tokenizer, export=_EXPORT.value)
    total = count_parameters(model.config)["total"]
    print(f"{model.source} -> {output}: {model.config.family}, {total:,} parameters")
    print(loads_in(output))
    if _PUSH.value:
        print(push(output, _PUSH.value))


if __name__ == "__main__":
    cli.launch_flags(main)
