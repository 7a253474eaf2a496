"""Every command of README and docs, with the files of `make demo`, at small settings.

The model is a tiny one under the real one's name, the texts are short; nothing else is replaced but
what SMALL says. What cannot run on a machine without network is in ELSEWHERE, with the reason.
"""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from tiny_models import REPOSITORY, TEXT, WIDE, byte_tokenizer, random_params, run_script

from ffn_heterogeneity.io.gguf.export import save_gguf

PAGES = ("README.md", "docs/commands.md", "docs/run-anywhere.md", "docs/scale.md", "docs/five.md")
HOWTO = ("prune", "shrink", "classify", "adapt", "pretrain", "evaluate", "reproduce", "add-a-loss")
PAGES += tuple(f"docs/howto/{name}.md" for name in (*HOWTO, "experts", "slurm", "report"))
OWN = "docs/howto/your-own.md"  # run from the wheel, tests/launch/test_ffnh.py
DOCS = [*(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "docs" / "howto").glob("*.md")]
# Settings that are appended to all commands that match.
TRAINS = r"/train\.py(?!.*(_recover|p32_glue|mlp_fusion|five|shrink))|ffnh train|"
TRAINS += r"sweep(\.py)? .*(jreg_pre|nucl_fine)"
SMALL = [
    (TRAINS, "--config.steps=2 --config.batch_size=2 --config.eval.max_batches=1"),
    (TRAINS, "--config.seq_len=32"),
    (r"_recover|shrink\.py", "--config.recover.steps=2 --config.recover.batch_size=2"),
    (r"shrink\.py:", "--config.recover.seq_len=32 --config.shrink.calibration_tokens=1536"),
    (r"_recover", "--config.recover.seq_len=32 --config.score.window=32"),
    (r"_recover", "--config.score.max_windows=2"),
    (r"jreg_pretrain", "--config.shape.d_model=8 --config.optimizer.warmup_steps=1"),
    (r"jreg_pretrain", "--config.shape.layers=2 --config.shape.n_heads=2"),
    (r"jreg_pretrain", "--config.shape.ffn_width=8 --config.data.validation_fraction=0.3"),
    (r"moe_pretrain|t5_pretrain", "--config.shape.d_model=8 --config.optimizer.warmup_steps=1"),
    (r"moe_pretrain", "--config.shape.n_heads=2 --config.data.validation_fraction=0.3"),
    (r"jreg_pretrain\.py:170m", "--config.batch_size=8 --config.accumulation=1"),
    (r"sweep=criteria", "--only=unpruned --only=entropy"),
    (r"p32_glue|five\.py", "--config.steps=2 --config.batch_size=4 --config.eval.max_batches=1"),
    (r"fuse_recover", "--only=whole --only=method=svd"),
    (r"p32_glue|five\.py|mlp_fusion", "--config.lengths=(32,)"),
    (r"mlp_fusion", "--config.ratio=0.5"),
    (r"sweep=poolings", "--only=seed=0,pooling=last"),
    (r"prepare_data", "--config.train_tokenizer.vocab_size=300"),
    (r"^(?!.*shrink\.py).*--config.text=|prune_table", "--config.window=32 --config.max_windows=2"),
    (r"jreg_sft|macdrop_sft", "--config.optimizer.warmup_steps=1 --config.accumulation=1"),
    (r",(mixture|webnlg)", "--config.seq_len=128"),  # a conversation, triples in bytes
    (r"chat\.py", "--config.limit=2 --config.max_new_tokens=4"),
    (r"answers\.py", "--config.limit=2 --config.max_new_tokens=2"),
    (r"fetch_models", "--only=smollm2"),
    (r"macdrop_sft", "--config.seq_len=1024"),
    (r"lesions", "--config.others=2"),
    (r"sweep=k ", "--only=none --only=attack=zero,k=3"),
    (r"sweep=rivals", "--only=unpruned --only=optipfair-train.txt"),
    (r"sweep=seeds", "--only=baseline,seed=0"),
    (r"dry_run=v5e", "--config.dry_run=h100:8"),
]
ELSEWHERE = {
    r"paper=removals\.py": "its two files stand on the page (tests/report/test_papers.py)",
    r"^hf |push=": "an account on the hub (tests/io/test_card.py)",
    r"^git ": "the clone that this test replaces",
    r"^make": "this is make's own work",
    r"^pip install": "an environment of its own (tests/launch/test_ffnh.py builds the wheel)",
    r"^source |^export |-m venv": "settings of a shell",
    r"^\.\.\. ": "a variation in words",
    r"^scripts/launch/": "printed word for word (test_launch.py)",
    r"launcher=submitit": "there is no cluster (tests/launch/test_sweep_table.py)",
    r"harness\.py": "the harness reads whole tasks (tests/evaluate/test_tasks.py)",
    r"benchmark\.py": "minutes (tests/bench)",
    r"load_dataset": "from the hub, where there is a network",
    r"gsm8k(?!.*dry_run)": "from the hub, where there is a network",
}


def commands(page: str) -> list[str]:
    """Indented blocks, with continued lines joined and comments removed."""
    text = re.sub(r"```.*?```", "", (REPOSITORY / page).read_text(), flags=re.S)
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines()]
    first = r"(git|python|ffnh|make|pip|source|export|yes|scripts/launch|\.\.\. |[A-Z_]+=)"
    return [line for line in lines if re.match(first, line)]


@pytest.fixture(scope="module")
def after_demo(tmp_path_factory):
    root = tmp_path_factory.mktemp("clone")
    for name in ("smollm2-135m-instruct", "gemma-3-270m"):
        path = root / ".cache" / "models" / f"{name}.gguf"
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = byte_tokenizer()
        tokenizer.backend_tokenizer.pre_tokenizer.use_regex = True
        save_gguf(WIDE, random_params(WIDE), path, tokenizer=tokenizer, type="f32")
    demo = root / "runs" / "demo"
    demo.mkdir(parents=True)
    for name in ("train", "heldout"):
        (demo / f"{name}.txt").write_text(TEXT * (50_000 // len(TEXT)))
    for name in ("README.md", "CHANGELOG.md", "wiki.test.raw"):
        (root / name).write_text(TEXT * (20_000 // len(TEXT)))
    # Rows in the forms of MRPC and RTE, and a user's table.
    pair = {"#1 String": "A b.", "#2 String": "A c.", "sentence1": "A b.", "sentence2": "A c."}
    rows = [pair | {"label": i % 2} for i in range(16)]
    for name in ("train", "validation"):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("rows", "more"):
        text = "".join(f"a sentence {i},{'yes' if i % 2 else 'no'}\n" for i in range(40))
        (root / f"{name}.csv").write_text("text,label\n" + text)
    data = REPOSITORY.parent / "shared" / "data"
    if data.is_dir():
        (root / "data").symlink_to(data.resolve())
    return root


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(after_demo, page, shared_data, torch):
    variables, ran, left_out = {"MODEL": "smollm2"}, 0, []
    variables["TEXT"] = "runs/demo/heldout.txt"
    for command in commands(page):
        reason = next(
            (why for pattern, why in ELSEWHERE.items() if re.search(pattern, command)), ""
        )
        if reason:
            left_out.append((command, reason))
            continue
        if command.startswith(("yes", "python -c")):
            command = command.replace("python -c", f"{sys.executable} -c")
            shell = {"cwd": after_demo, "env": {**os.environ, **variables}}
            subprocess.run(["bash", "-c", command], check=True, **shell)
            continue
        for name, value in variables.items():
            command = command.replace(f"${name}", value)
        if match := re.fullmatch(r"([A-Z_]+)=(.*)", command):
            variables[match[1]] = shlex.split(match[2])[0]
            continue
        small = " ".join(more for pattern, more in SMALL if re.search(pattern, command))
        parts = shlex.split(f"{command.split(' > ')[0]} {small}")
        script = re.fullmatch(r"scripts/(\w+)\.py", parts[1])
        done = run_script(script[1] if script else parts[1], *parts[2:], cwd=after_demo)
        assert done.code == 0, f"{command}\n{done.err[-2000:]}"
        ran += 1
    print(f"{page}: {ran} commands ran, {len(left_out)} left out")
    for command, reason in left_out:
        print(f"  {command[:80]}: {reason}")
    assert ran + len(left_out) > 0


def test_no_page_is_forgotten():
    with_commands = {
        str(path.relative_to(REPOSITORY))
        for path in [REPOSITORY / "README.md", *DOCS]
        if any(not re.match(r"[A-Z_]+=", line) for line in commands(path))
    }
    assert with_commands <= {*PAGES, "docs/performance.md", "docs/reproduce.md", OWN}
    assert os.path.basename(PAGES[0]) == "README.md"


def test_what_pages_point_to_is_there():
    """Paths in words or commands: in a clean clone git has them as well."""
    rooms = "docs|configs|scripts|tests|ffn_heterogeneity|notebooks"
    for page in [*REPOSITORY.glob("*.md"), *DOCS]:
        # (Files of diffs are made by test_adding.py, which applies them.)
        text = re.sub(r"```diff.*?```", "", page.read_text(), flags=re.S)
        named = re.findall(rf"(?<![\w./>])(?:{rooms})/[\w./*<>-]*\w", text)
        paths = {re.sub("<[^>]*>", "*", x) for x in named}
        assert [x for x in paths if not any(REPOSITORY.glob(x))] == [], page
