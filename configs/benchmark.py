"""Benchmarks: ratios inside one run.

Command:   python scripts/benchmark.py nucl | nll | model [--config.peer=transformers] | streaming
           python scripts/benchmark.py fusion --config.model=minilm_l6 --config.batch=32 \
             --config.seq_len=128
           python scripts/benchmark.py fusion --config.model=switch_base_16 --config.batch=4 \
             --config.seq_len=100 --config.optimizer=sgd --config.methods="('fusion',)"
           python scripts/benchmark.py model --config.calls="('train step','train step + JREG')"
           python scripts/benchmark.py model --config.model=<smaller> --config.beside=<whole>
           python scripts/benchmark.py steps --config.batch=8 --config.seq_len=128 \
             --config.configs="('configs/five.py:<model>,mrpc', ...:<model>,mrpc,fuse,dora')"
           python scripts/benchmark.py steps --config.compute_dtype=bfloat16 \
             --config.seq_len=1024 --config.configs="(
             'configs/jreg_pretrain.py:134m accumulation=1 batch_size=64 remat=none unroll=0',
             'configs/jreg_pretrain.py:134m accumulation=1 batch_size=64 remat=dots unroll=1')"
           python scripts/benchmark.py experts --config.batch=4 --config.peer=transformers
           python scripts/benchmark.py streaming --config.model=gemma2_2b --config.repetitions=3
Hardware:  any; figures in docs/benchmarks.md name theirs.
Hours:     nucl, nll, streaming a few minutes; model, all calls with the peer, two hours: what
           was measured is saved, and the same command with the same --workdir resumes.
"""

from ml_collections import ConfigDict

from ffn_heterogeneity.bench.cases import CALLS


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            # model | nucl | nll | fusion | steps | streaming | experts.
            "name": "",
            # Of model, fusion, streaming: a preset, or the shape of a directory (random weights).
            "model": "smollm2_135m",
            "calls": CALLS,  # of model, and of fusion (forward, train step): what is timed
            # Of fusion: LoRA | mlp_lora | fusion | structured | svd | unstructured; (): all but
            # mlp_lora, which trains all that is no MLP's kernel. And the optimizer of its steps.
            "methods": (),
            "optimizer": "adamw",  # adamw | adafactor | sgd
            "dtypes": ("float32", "bfloat16"),  # of model: what it is computed in
            # Of steps: training configs, the last of which the others are compared with; settings
            # may follow each: "<file>:<argument> remat=none batch_size=64".
            "configs": (),
            "compute_dtype": "float32",  # of steps
            "compile_limit": 0.0,  # of steps: seconds, then no further step is compiled; 0: none
            "batch": 2,  # rows of the forward pass and the training step
            "seq_len": 512,  # tokens a row
            "windows": 40,  # of perplexity
            "window": 128,  # tokens a window
            "remat": "dots",  # of the training step
            "unroll": 1,  # layers a scan step
            # transformers | torch.compile: torch on the same weights, interleaved (extra `parity`).
            "peer": "",
            # Of model: a second model in the same rounds. Without a peer the two are compared,
            # with one how far each is ahead of it.
            "beside": "",
            # Measured rounds, after one that compiles.
            "repetitions": 20,
            # Of streaming: on the disk to be measured, with room for three checkpoints (default:
            # that of temporary files).
            "directory": "",
        }
    )
