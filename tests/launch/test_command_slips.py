"""Mistakes on the command line: each gives one line with the solution, never a traceback."""

import json
import shlex
import sys

import pytest
from tiny_models import REPOSITORY, run_script
from tiny_runs import Finished

from ffn_heterogeneity.launch import configs, ffnh

# Lines of "what the error must contain | a command line ;; another". The last line is a known gap.
SLIPS = """
write python scripts/compress.py --config=prune | train --config=prune ;; train --config prune
write python scripts/compress.py --config=prune | evaluate --config=configs/prune.py
scripts/compress.py --config=adapt:lora | train --config=adapt:lora ;; analyze --config=adapt:lora
scripts/evaluate.py --config=perplexity | train --config=perplexity ;; compress --config=perplexity
scripts/analyze.py --config=analyze:massive | train --config=analyze:massive
scripts/train.py --config=five:x,rte | compress --config=five:x,rte ;; analyze --config=five:x,rte
scripts/sweep.py --config=prune_table | train --config=prune_table
scripts/train.py | train --config=prune_recover:x,text --config.recover.kind=surgery
`ffnh configs` lists the command | sweep --config=prune --sweep=x ;; sweep --config=perplexity
did you mean 'prune'? | compress --config=prun ;; compress --config=Prune ;; sweep --config=prnue
did you mean 'prune'? | compress --config=prune.py ;; compress --config=configs/prunes.py
did you mean 'nucl_finetune'? | train --config=nucl-finetune:x,text ;; train --config=nucl_finetun
did you mean 'nucl_finetune'? | train --config=nucl_finetune,x,text ;; train --config=NUCL_finetune
<model>,<data> | train --config=nucl_finetune:smollm2 ;; train --config=nucl_finetune:,text
did you mean 'mrpc'? | train --config=five:smollm2,mprc ;; train --config=p32_glue:smollm2,mprc
use --config.<key>=<value> | compress --config=prune:entropy
<model>,<data> | train --config=nucl_finetune:foo
gsm8k | train --config=nucl_finetune:a,b
config file '' | compress --config= ;; compress --config
a model is --config.model=<model> | evaluate --config=smollm2 ;; evaluate --config=runs/x/model
`ffnh configs` describes ours | evaluate --config=config.json ;; train --config ;; train --config=
did you mean 'steps'? | train --config.step=10 ;; train --config.Steps=10
did you mean 'ratio'? | compress --config.ration=1 --config=configs/prune.py
did you mean 'reverse'? | compress --noconfig.reverze
did you mean 'losses.nucl.weight'? | train --config.nucl.weight=1
'losses.nucl' is a group | train --config.losses.nucl=1
config.ratio=abc | compress --config.ratio=abc
config.seed=1.5 | compress --config.seed=1.5
config.count=many | compress --config.count=many
config.reverse=maybe | compress --config.reverse=maybe
config.ratio | compress --config.ratio
set one of losses.nucl.axis | train --config.losses.nucl=1
write --config.model=x | compress --model=x ;; compress -model=x ;; compress --modle=x
write --config.model=x | compress model=x ;; compress config.model=x ;; convert --modle=x --output=y
write --config.ratio | compress --ratio 0.25 ;; compress --ratio=0.25
write --config.steps=10 | train --steps=10 ;; train --step=10
write --config.steps | train --steps 10
write --config.dtype=float16 | compress --dtype=float16
write --config.optimizer.learning_rate=1 | train --learning_rate=1 ;; train --learning-rate=1
write --config.losses.nucl.weight=1 | train --losses.nucl.weight=1 ;; train --nucl.weight=1
write --config.dry_run=here | train --dry-run=here
write --config=five | train --confg=five ;; train –config=five ;; train config=five
write --workdir=x | train --work-dir=x ;; train --workdr=x ;; train --Workdir=x
write --config=prune | compress prune
write --config=five:x,rte | train five:x,rte
write --config=configs/five.py:x,rte | train configs/five.py:x,rte
--config.model | evaluate smollm2 ;; convert smollm2 --output=x ;; compress --config.model
--workdir | compress --output=x ;; train --lr=1 ;; train --workdir
--output | convert --model=x ;; convert --config.model=x ;; convert --config.model=x --workdir=y
--only | fetch_models smollm2
default: --config.steps=1000 | train --config.steps=ten ;; train --config.steps = 10
its default: --config.ratio=0.25 | compress --config.ratio=25%
use quotes | train '--config.seeds=(0,' '1,' '2)'
--config.model is empty: give a directory | compress ;; evaluate ;; analyze
did you mean 'entropy'? | compress --config.model=x --config.criterion=Entropy
smollm2_135m | compress --config.model=smolm2 ;; convert --config.model=SMOLLM --output=x
no such file | compress --config.model=no.gguf ;; evaluate --config.text=no.txt --config.model=x
bfloat16 | convert --config.model=x --output=y --config.dtype=int8
did you mean 'alpha'? | sweep --sweep=alhpa
name the work directories | report
model|nucl|nll | benchmark nlll ;; benchmark
repetitions=x | benchmark model nll --config.repetitions=x
peer='onnx' | benchmark model --config.peer=onnx
calls='step' | benchmark model "--config.calls=('step',)"
gpt5 | benchmark model --config.model=gpt5 ;; fetch_models --only=gpt5
'sinks' | analyze --config=configs/analyze.py:sinks --config.model=x
'no/such/model' | compress --config.model=no/such/model
'nothing' | convert --model=nothing --output=nowhere
steps | demo --steps=1
did you mean 'train'? | trian ;; Train ;; train.py
write ffnh compress --config=prune | prune ;; --config=prune
scripts/sweep.py | train --sweep=alpha
"""


def run(command: str, *rest: str, cwd, capsys) -> Finished:
    if (REPOSITORY / "scripts" / f"{command}.py").exists():
        return run_script(command, *rest, cwd=cwd)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(sys, "argv", ["ffnh", command, *rest])
        ffnh.main()
    return Finished(stopped.value.code, *capsys.readouterr())


def test_slips_get_the_way_out(tmp_path, capsys):
    rows = [line.rpartition(" | ")[::2] for line in SLIPS.strip().splitlines()]
    slips = [(words, slip) for words, lines in rows for slip in lines.split(" ;; ")]
    errors = [run(*shlex.split(slip), cwd=tmp_path, capsys=capsys).error for _, slip in slips]
    missed = [(x, error) for x, error in zip(slips, errors, strict=True) if x[0] not in error]
    assert [slip for slip, _ in missed] == slips[-1:], missed
    assert not [*tmp_path.glob("runs/*")], "nothing was written, so nothing is left"


def test_every_config_is_listed_with_its_command(capsys, monkeypatch):
    """The listed command is in the config's docstring."""
    monkeypatch.setattr(sys, "argv", ["ffnh", "configs"])
    ffnh.main()
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _, _ in rows] == [*configs.ours()]
    for name, command, about in rows:
        text = configs.ours()[name].read_text()
        assert f"scripts/{command}.py" in text and text.startswith(f'"""{about}')


def test_convert_speaks_as_compress_and_as_before(model, tmp_path):
    for output, prefix in (("new", "--config."), ("old", "--")):
        keys = [f"{prefix}model={model}", f"{prefix}dtype=bfloat16", f"{prefix}tokenizer=false"]
        assert run_script("convert", *keys, f"--output={tmp_path / output}").code == 0
        assert json.loads((tmp_path / output / "config.json").read_text())["dtype"] == "bfloat16"
        assert not (tmp_path / output / "tokenizer.json").exists()
