"""Small run directories, written by hand as the scripts write them, for the tests of reports.

`golden/*.csv` are the tables that the engine of paper modules made of `nucl_runs` and `jreg_runs`
before one engine replaced it (commit 3ace6c5).
"""

from __future__ import annotations

import csv
import json

from tiny_runs import write_rows

NLL, ZETA = "validation/nll", "validation/jreg/zeta_L"
ENTROPY = "validation/entropy/ent/ffn_out/mean"
EVALUATION = {"text": "wiki.txt", "window": 512, "max_windows": 40, "bos": "segment"}
LAMBADA = {"text": "lambada.txt", "token_ids": "", "window": 64, "max_windows": 4, "bos": "segment"}
SHAPE = {"layers": 4, "d_model": 8, "ffn_width": 24}
# step -> (zeta_L, validation NLL)
RISING = {0: (0.0, 8.0), 10: (6.0, 5.0), 20: (12.0, 4.0)}
FLAT = {0: (0.0, 8.0), 10: (0.3, 5.2), 20: (0.2, 4.1)}


def write_run(path, config, results=None, rows=()):
    """A work directory; without results it is not finished."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if rows:
        write_rows(path / "metrics.jsonl", rows)
    if results is not None:
        (path / "results.json").write_text(json.dumps(results))
    return str(path)


def score(value, metric="acc", *, n=100, shots=0):
    """One task's results; the interval is the metric +- 0.1."""
    ends = {f"{metric}_low": value - 0.1, f"{metric}_high": value + 0.1}
    return {"n": n, "shots": shots, metric: value, **ends}


def removal(path, perplexity=None, *, model="models/small.gguf", gone=10.0, tasks=None, **config):
    """A point of configs/prune_table.py; without a perplexity it is not finished."""
    values = {"criterion": "entropy", "reverse": False, "compensation": "none", "layers": "all"}
    values |= {"ratio": 0.25, "seed": 0, "model": model, **EVALUATION, **config}
    found = {"perplexity": perplexity, "parameters_removed_percent": gone}
    found |= {"tasks": tasks} if tasks else {}
    return write_run(path, values, None if perplexity is None else found)


def training(path, alpha, curve, *, finished=True, tasks=None, model="hub/tuned", **nucl):
    """A fine-tuning run; `curve`: step -> (entropy, nll); `nucl`: its variant and targets."""
    nucl = {"variant": "mstd", "targets": ["ffn_out"], "weight": alpha, **nucl}
    values = {"model": model, "batch_size": 4, "steps": 20, "dropout": 0.1, "seeds": []}
    values |= {"losses": {"nucl": nucl}, "data": {"task": "gsm8k", "path": ""}}
    values["optimizer"] = {"name": "adamw", "learning_rate": 1e-5, "warmup_steps": 10}
    rows = [{"step": s, ENTROPY: e, NLL: n} for s, (e, n) in curve.items()]
    found = {"final": rows[-1], "device": "cpu"} | ({"tasks": tasks} if tasks else {})
    return write_run(path, values, found if finished else None, rows)


def pretrain(path, weight, curve, *, alpha=1.0, finished=True, psi=(), **settings):
    """A run of configs/jreg_pretrain.py; `psi`: the displacements of its last evaluation."""
    jreg = {"weight": weight, "alpha": alpha, "final_norm": False, "positions": "all"}
    jreg["term"] = "jreg"
    values = {"model": "", "tokenizer": "tokens", "batch_size": 4, "seq_len": 16, "steps": 20}
    values |= {"shape": SHAPE, "data": {"task": "tokens", "path": "corpus"}, "seed": 0, "seeds": []}
    values |= {"optimizer": {"learning_rate": 1e-3}}
    values |= {"losses": {"jreg": jreg, "nll": {"reduction": "mean"}}, **settings}
    rows = evaluations(curve, psi)
    found = {"final": rows[-1], "parameters": 1234, "device": "cpu"}
    return write_run(path, values, found if finished else None, rows)


def evaluations(curve, psi=()):
    """Rows of metrics.jsonl; every jump rate is the same."""
    rows = [
        {"step": step, ZETA: zeta, f"{ZETA}-1": zeta, f"{ZETA}-2": zeta, NLL: nll, ENTROPY: 5.5}
        for step, (zeta, nll) in curve.items()
    ]
    if psi:
        rows[-1]["validation/jreg/psi"] = list(psi)
    return rows


def reading(psi, **rates):
    """Results of an analysis for one reading of h_L."""
    return {"psi": list(psi), "zeta_L": 9.5, "zeta_L-1": 9.75, "zeta_L-2": 10.25, **rates}


def analysed(path, model, config=(), **results):
    """A run of configs/analyze.py:displacement."""
    values = {"analysis": "displacement", "model": model, "positions": "all", **LAMBADA}
    default = {"before_final_norm": reading([0.5, 0.1, 0.2]), "tokens": 260}
    default["after_final_norm"] = reading([0.5, 0.1, 0.6], zeta_L=50.0)
    return write_run(path, values | dict(config), results or default)


def scored(path, model, tasks):
    """A run of scripts/evaluate.py that scored tasks."""
    results = {"model": model, "tasks": tasks}
    return write_run(path, {"model": model, "evaluation": "tasks"}, results)


def nucl_runs(root):
    """Removals of two models, fine-tuning of one: every kind of row the NUCL report has."""
    hellaswag = score(0.5, shots=10) | {"acc_norm": 0.55}
    points = {
        "unpruned": (20.0, {"criterion": "none", "gone": 0.0}),
        "entropy": (45.0, {"tasks": {"hellaswag": hellaswag}}),
        "gini": (50.0, {"criterion": "gini"}),
        "magnitude": (12345.6, {"criterion": "magnitude"}),
        "babu": (2000.0, {"criterion": "similarity", "compensation": "sum"}),
        "byrne": (3000.0, {"criterion": "similarity", "compensation": "least_squares"}),
        "ridge": (2500.0, {"criterion": "similarity", "compensation": "ridge"}),
        "lowest": (9000.0, {"reverse": True}),
        "unfinished": (None, {"criterion": "mstd"}),
        "other": (7.0, {"model": "org/Other-1B"}),
    }
    for i, perplexity in enumerate((400.0, 500.0, 900.0)):
        own = {"criterion": "random", "seed": i, "tasks": {"piqa": score(0.5 + i / 10)}}
        points[f"random{i}"] = (perplexity, own)
    for i, layers in enumerate(("top", "bottom", "even", "odd", "pair:0", "pair:1")):
        points[layers] = (20.0 + i, {"layers": layers})
    runs = [removal(root / name, value, **own) for name, (value, own) in points.items()]
    curves = {
        "m0": (0.0, {0: (6.0, 3.0), 10: (6.0, 2.5), 20: (6.0, 2.0)}),
        "m10": (10.0, {0: (6.0, 3.0), 10: (5.9, 2.4), 20: (5.8, 1.9)}),
        "m1000": (1000.0, {0: (6.0, 3.0), 10: (5.0, 2.8), 20: (4.0, 2.6)}),
    }
    runs += [training(root / name, *curve) for name, curve in curves.items()]
    last = {0: (6.0, 3.0), 20: (6.0, 2.3)}
    own = {"targets": ["attention_out"], "tasks": {"gsm8k": score(0.25, "exact_match", n=8)}}
    runs.append(training(root / "g1", 1.0, {0: (6.0, 3.0), 20: (5.9, 2.1)}, variant="gini"))
    runs.append(training(root / "late", 100.0, {0: (6.0, 3.0), 10: (5.5, 0.1)}, finished=False))
    runs.append(training(root / "attention", 10.0, last, **own))
    for alpha, value in ((0, 0.2), (10, 0.25)):
        tasks = {"gsm8k": score(value, "exact_match")}
        runs.append(scored(root / f"score{alpha}", f"{root}/m{alpha}/model", tasks))
    return runs


def seed_runs(root):
    """Baseline and JREG over two seeds, and a sharpness of one."""
    other = {0: (0.0, 8.0), 10: (8.0, 5.0), 20: (14.0, 4.2)}
    return [
        pretrain(root / "base0", 0.0, RISING, psi=[0.4, 0.2, 0.1, 0.22]),
        pretrain(root / "base1", 0.0, other, seed=1, psi=[0.4, 0.2, 0.1, 0.26]),
        pretrain(root / "jreg0", 1.0, FLAT, psi=[0.4, 0.2, 0.1, 0.1]),
        pretrain(root / "jreg1", 1.0, {0: (0.0, 8.0), 20: (0.4, 4.2)}, seed=1),
        pretrain(root / "sharp", 1.0, {0: (0.0, 8.0), 20: (1.5, 4.5)}, alpha=3.0),
    ]


def write_seeds(many, **config):
    """A run over seeds 3 and 4, with a directory for each."""
    pretrain(many, 0.0, RISING, seeds=[3, 4], **config)
    (many / "metrics.jsonl").unlink()
    for seed, last in ((3, 4.0), (4, 5.0)):
        rows = evaluations({0: (0.0, 8.0), 20: (2.0 * seed, last)}, [0.1 * seed, 0.2, 0.3, 0.4])
        write_run(many / f"seed_{seed}", {}, {"final": rows[-1]}, rows)
    (many / "results.json").write_text(json.dumps({"seeds": [3, 4]}))
    return str(many)


def checkpoint_points(steps, psi):
    """An analysis' points; `psi(step)`: the displacements after the final norm."""
    return [
        {
            "checkpoint": f"step{n}",
            "step": n,
            "after_final_norm": psi(n),
            "before_final_norm": reading([0.1, 0.2], zeta_L=n / 100),
        }
        for n in steps
    ]


def jreg_runs(root):
    """Pre-training over seeds and setups, analyses of models and of checkpoints, accuracies."""
    runs = [
        *seed_runs(root),
        pretrain(root / "rate", 0.0, {20: (99.0, 9.0)}, optimizer={"learning_rate": 2e-3}),
        pretrain(root / "begun", 1.0, {0: (0.0, 8.0), 10: (1.0, 5.0)}, alpha=0.5, finished=False),
        pretrain(root / "again" / "again", 0.0, {20: (50.0, 9.0)}),
    ]
    config = {"shape": SHAPE | {"layers": 6}}
    runs.append(write_seeds(root / "many", **config))
    runs.append(pretrain(root / "after", 1.0, {0: (0.0, 8.0), 20: (0.0, 4.75)}, seed=4, **config))
    points = checkpoint_points((2000, 1000), lambda n: reading([0.1, 0.2], zeta_L=40.0))
    return [
        *runs,
        analysed(root / "one", "models/little.gguf"),
        analysed(root / "two", f"{runs[0]}/model"),
        analysed(root / "series", "hub/pythia", checkpoints=points),
        *(
            scored(root / f"score{i}", f"{runs[i]}/model", {"piqa": score(value)})
            for i, value in enumerate((0.25, 0.75, 0.5))
        ),
    ]


def attack(path, attack, k, perplexity, *, windows=(3.0, 3.2), answers=None, **config):
    """A point of configs/attack_table.py; `answers`: whether each question of piqa was right."""
    values = {"surgery": "attack", "attack": attack, "k": k, "layer": None, "token": None}
    values |= {**EVALUATION, "text": "data/wikitext2/test.txt", "model": "models/small.gguf"}
    values |= config
    found = {"perplexity": perplexity, "nll": sum(windows) / len(windows), "layer": 12}
    found["nll_windows"] = list(windows)
    run = write_run(path, values, found)
    if answers is not None:
        found["tasks"] = {"piqa": score(sum(answers) / len(answers), n=len(answers))}
        (path / "results.json").write_text(json.dumps(found))
        rows = [{"doc_id": i, "acc": float(x)} for i, x in enumerate(answers)]
        write_rows(path / "samples" / "piqa.jsonl", rows)
    return run


def adapted(path):
    """A run of configs/macdrop_sft.py."""
    drops = {"k": 5, "p0": 0.8, "curriculum": "step", "a": 0.01, "epochs": 3, "scope": "massive"}
    values = {"model": "models/small.gguf", "prepare": ["lora", "macdrop"], "macdrop": drops}
    return write_run(path, values | {"train_only": ["/lora_"], "lora": {"rank": 16}}, {"nll": 1.0})


def massive(path, model, layer=2, indices=(5, 3, 1, 2, 0), **expert):
    """A run of configs/analyze.py:massive on three layers."""
    state = {"top": [9.0, 2.0, 1.0], "indices": [1, 2, 3], "median": 0.5}
    rows = [{"h_out": state, "intermediate": state | {"median": 0.1 * i}} for i in range(3)]
    values = {"analysis": "massive", "model": model, "layer": None, "token": None}
    found = {"layer": layer, "indices": [*indices, 7, 8], "layers": rows, **expert}
    return write_run(path, values, found)


def read_csv(path):
    """Header and rows of a table."""
    with path.open() as file:
        header, *rows = csv.reader(file)
    return header, rows


def claim(tables, statement, where=""):
    """(measured, verdict)."""
    rows = [r for r in tables["claims"] if r["statement"].startswith(statement)]
    (row,) = [r for r in rows if where in r["run on"]]
    return row["measured"], row["verdict"]


def lines(tables, key):
    """(panel, line, seed) -> [(x, y)]."""
    found = {}
    for row in tables[key]:
        *name, x, y = row.values()
        found.setdefault((name[0], name[2], name[3]), []).append((float(x), float(y)))
    return found
