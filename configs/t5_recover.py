"""Ways to compress the FFNs of an encoder-decoder, each with recovery by span corruption.

Command:   python scripts/sweep.py --config=configs/t5_recover.py:<model> --sweep=methods \
             --config.recover.data.path=<tokens> --config.tune.data.path=<the same> \
             --config.calibration=<text> --workdir=runs/recover
           A Switch, each expert on its own; a dense T5 with --config.layers=all. The recovery's
           first evaluation is of the compressed model, its last one of the recovered model
           (results.json, validation/nll). Sweeps: methods (one seed) | drawn (three seeds of those
           that draw). One method alone: scripts/train.py with --config.compress.method=<method>.
Hardware:  any CPU for a small model; else that of configs/t5_pretrain.py.
Hours:     not measured.
Paper:     Table III's methods of MLP Fusion, on a loss that tells them apart in a small model; the
           paper fine-tunes Switch-base-16 on GLUE (configs/switch.py).

A stage is a group, as in configs/prune_recover.py.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ffn_heterogeneity.launch.sweep import chain, point, product


def get_config(argument: str = "runs/t5/model") -> ConfigDict:
    if not argument or "," in argument:
        raise ValueError(f"config argument {argument!r}: write <model>")
    config = ConfigDict(
        {
            "model": argument,  # an encoder-decoder to compress: a directory or a hub id
            "stages": ("compress", "recover"),  # in this order; each is a group below
            "seeds": (),  # (0, 1, 2): all stages once per seed, and the mean of every number
            "dry_run": "",  # here | v5e:8x8 | h100:8 ...: what the training stages need there
            "seed": 0,  # of every stage
            "layers": "sparse:all",  # compressed: encoder:sparse:last4+decoder:sparse:last4 | all
            "ratio": 0.75,  # of their neurons, or weights, or experts (m_smoe), that goes
            "calibration": "",  # of m_smoe: a text file, which both stacks read
        }
    )
    shared = {key: config.get_ref(key) for key in ("layers", "seed")}
    lost = {"ratio": config.get_ref("ratio")}
    # configs/fuse.py and configs/experts.py explain the keys of these two.
    config.compress = {"kind": "surgery", "base": "fuse", "method": "fusion"}
    config.compress.update(shared | lost)
    config.merge = {"kind": "surgery", "base": "experts:merge_experts", "method": "m_smoe"}
    config.merge.update(shared | lost | {"calibration": config.get_ref("calibration")})
    config.residuals = {"kind": "surgery", "base": "experts:merge_experts", "method": "resmoe"}
    config.residuals.update(shared | {"share": 0.25})  # of the residuals that is stored
    config.tune = _training(config, "t5_pretrain:local,teacher,layerwise")
    config.tune.teacher = {"model": argument}
    config.tune.train_only = ("@taught",)  # the blocks that have a teacher
    config.tune.losses = {"layerwise": {"weight": 1.0}, "nll": {"weight": placeholder(float)}}
    config.tune.eval.best_metric = "validation/layerwise"
    config.recover = _training(config, "t5_pretrain:local")
    return config


def _training(config: ConfigDict, base: str) -> dict:
    return {
        "kind": "train",  # train | surgery | evaluate
        "base": base,  # the config that it starts from
        "steps": 100,
        "batch_size": 8,  # rows a step
        "seq_len": 128,  # tokens of a row of the encoder
        # Shards; of separate held-out data, too, or "": 5% of the documents of `path`.
        "data": {"path": "", "validation_path": ""},
        "freeze": ("/ffn/router/",),
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "warmup_steps": 10},
        "eval": {"max_batches": 16},
        "export": {"weights": "last"},
        "seed": config.get_ref("seed"),
    }


KIND = "train"
TUNED = point("tuned", {"stages": ("compress", "tune", "recover")})
ON_WEIGHTS = ("fusion", "merged", "sqrt", "structured", "svd", "unstructured", "hybrid_sketch")
DRAWN = ("fusion", "merged", "sqrt", "hybrid_sketch", "mmd", "ntk_sap")  # whose seed matters
SWEEPS = {
    "methods": chain(
        point("whole", {"stages": ("recover",)}),
        product({"compress.method": (*ON_WEIGHTS, "mmd", "ntk_sap")}),
        product(TUNED, {"compress.method": ("fusion", "sqrt")}),
        point("m_smoe", {"stages": ("merge", "recover")}),
        point("resmoe", {"stages": ("residuals", "recover")}),
    ),
    "drawn": chain(
        product({"compress.method": DRAWN[:3], "seed": (1, 2)}),
        product(TUNED, {"compress.method": ("fusion", "sqrt"), "seed": (1, 2)}),
    ),
}
