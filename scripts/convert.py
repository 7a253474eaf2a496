"""Converts any readable model into a Hugging Face directory of safetensors, or a GGUF file.

Reads a directory, a .gguf file, a preset or a hub id. Example:
  python scripts/convert.py --config.model=smollm2.gguf --config.dtype=bfloat16 --output=smollm2
  python scripts/convert.py --config.model=runs/pruned/model --config.type=q8_0 --output=small.gguf
"""

import re
import sys

from absl import flags

from ffn_heterogeneity.io.gguf.export import TYPES, save_gguf
from ffn_heterogeneity.io.hf.card import check_repository, push_directory
from ffn_heterogeneity.io.hf.export import EXPORTS, loads_in, save_pretrained
from ffn_heterogeneity.io.hf.peft import save_adapters
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import cli, compress
from ffn_heterogeneity.models.leaves import parameters_text

_MODEL = flags.DEFINE_string("config.model", None, "The model to convert.", required=True)
_REVISION = flags.DEFINE_string("config.revision", None, "Branch, tag or commit of a hub id.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory or .gguf to write.", required=True)
_PUSH = flags.DEFINE_string("config.push", "", "<owner>/<name>: to the Hugging Face hub, too.")
_TYPE = flags.DEFINE_enum("config.type", "f16", tuple(TYPES), "Of a .gguf file's matrices.")
_TOKENIZER = flags.DEFINE_bool("config.tokenizer", True, "With the tokenizer.")
_DTYPE = flags.DEFINE_enum("config.dtype", "as_read", compress.DTYPES, "Type of the weights.")
_EXPORT = flags.DEFINE_enum("config.export", "auto", EXPORTS, "Of FFNs of unequal width.")
_PEFT = flags.DEFINE_string("config.peft", "", "PEFT's base model: writes adapters alone.")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "Replace an existing directory.")
_OLD = r"^--?(no)?(model|revision|push|type|tokenizer|dtype|export|peft)(?=$|=)"  # without config.


def main() -> None:
    kind = "peft" if _PEFT.value else "gguf" if _OUTPUT.value.endswith(".gguf") else "directory"
    for flag, kinds in (_TYPE, "gguf"), (_EXPORT, "directory"), (_TOKENIZER, "directory or gguf"):
        if flag.present and kind not in kinds:
            raise ValueError(f"--{flag.name} is for output as {kinds}, this is {kind}")
    if _PUSH.value:
        check_repository(_PUSH.value, _OUTPUT.value)
    dtype = {"as_read": None}.get(_DTYPE.value, _DTYPE.value)
    model = load_model(_MODEL.value, revision=_REVISION.value, dtype=dtype)
    over, output = {"overwrite": _OVERWRITE.value}, _OUTPUT.value
    given = (model.config, model.params, output)
    whole = {"tokenizer": model.tokenizer if _TOKENIZER.value else None} | over
    if kind == "peft":
        save_adapters(*given, _PEFT.value, **over)
    elif kind == "gguf":
        output = save_gguf(*given, **whole, type=_TYPE.value, source=model.source)
    else:
        output = save_pretrained(*given, **whole, export=_EXPORT.value)
    print(f"{model.source} -> {output}: {model.config.family}, {parameters_text(model.config)}")
    print(loads_in(output))
    if _PUSH.value:
        print(push_directory(output, _PUSH.value))


if __name__ == "__main__":
    cli.launch_flags(main, [re.sub(_OLD, r"--\1config.\2", one) for one in sys.argv])
