"""The keys that every training experiment has, commented once; and those that one may add:

prepare            surgeries before training, each with its group (parts/adapters.py)
refresh            what redraws leaves every step (adapters.REFRESHES), each with its group
objective          another task than language modelling (train/objectives.py)
optimizer.rates    ((regex, factor), ...): leaves, or layers, whose learning rate is another
optimizer.momentum and other settings of an optimiser (train/optimizers.py)
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    config = ConfigDict()
    # Model: a directory, a .gguf file, a hub id or the name of a preset.
    config.model = ""
    config.revision = placeholder(str)  # branch, tag or commit of a hub id
    config.seed = 0  # of dropout and of the order of the data
    config.data = ConfigDict()
    config.data.task = "text"  # what a record is: text, tokens, jsonl, or a task's name
    # Text, .jsonl, .csv, .parquet; a directory of such files or of datasets' save_to_disk; a hub
    # name; "" takes the task's own.
    config.data.path = ""
    config.data.validation_fraction = 0.05  # held out, the same part whatever the seed
    config.data.validation_path = ""  # separate data instead

    config.steps = 1000  # of the whole run
    config.batch_size = 16  # rows a step
    config.accumulation = 1  # micro-batches a step
    config.seq_len = 512  # tokens a row

    config.losses = ConfigDict()  # one group per loss (configs/parts/losses.py)
    config.monitors = ConfigDict()  # what is only measured
    config.dropout = 0.0  # on the outputs of the residual branches; 0 compiles none

    config.optimizer = ConfigDict()
    config.optimizer.name = "adamw"  # adamw | adafactor | sgd
    config.optimizer.learning_rate = 1e-4  # after the warm-up
    config.optimizer.schedule = "constant"  # after the warm-up: constant | linear | cosine
    config.optimizer.warmup_steps = 100  # from 0 to the learning rate, linearly
    config.optimizer.final_fraction = 0.0  # of the rate, at the end of linear and cosine
    config.optimizer.weight_decay = 0.0  # decoupled; of matrices
    config.optimizer.b2 = 0.999  # decay of the second moment
    config.optimizer.clip_norm = placeholder(float)  # global gradient norm; None: no clipping

    # Regexes of parameter paths that stay as they are, and of the only ones that train (none: all).
    # Each layer has its own names, layers/<i>/ffn/down/kernel.
    config.freeze = ()
    config.train_only = ()  # see freeze

    # Devices along each axis; one may be -1: all that are left. Batches are cut over data x fsdp,
    # weights and their optimiser state over fsdp x tensor.
    config.mesh = ConfigDict()
    config.mesh.data = 1  # copies of the model, each with other rows
    config.mesh.fsdp = -1  # parts of the weights along d_model, gathered a layer at a time
    config.mesh.tensor = 1  # parts of the neurons and heads
    config.compute_dtype = "auto"  # float32 | bfloat16; auto: where it is fast, bfloat16
    # none | dots | attention_output | full; auto: the first that fits, on a CPU or TPU not none.
    config.remat = "auto"
    config.unroll = -1  # layers a scan step; 0: all; -1: all on a single GPU, elsewhere one

    _what_is_kept(config)
    config.tensorboard = True  # events in addition to metrics.jsonl
    config.wandb = ""  # project of Weights & Biases to log to as well (extra `wandb`)
    config.profile = ""  # <start>:<stop>, steps to trace into <workdir>/profile
    config.dry_run = ""  # here | v5e:8x8 | h100:8 ...: what the run needs there; nothing is trained
    config.seeds = ()  # (0, 1, 2): one run each, and their mean with an interval
    return config


def new_model(config: ConfigDict, layers: int, d_model: int, ffn_width: int, heads: int) -> None:
    """The shape of a model with random weights, or a model to continue from."""
    config.model = ""  # a model to continue from; "": a new one of the shape below
    config.shape = ConfigDict()
    config.shape.layers = layers  # transformer blocks (of an encoder-decoder: of the decoder)
    config.shape.d_model = d_model  # width of the residual stream
    config.shape.ffn_width = ffn_width  # neurons of a block, or of an expert
    config.shape.n_heads = heads  # of attention
    config.shape.vocab_size = 32_000  # the tokenizer's, or more
    config.shape.tied = False  # whether the head is the embedding table
    # Of a new model: a directory, a .gguf file or a hub id.
    config.tokenizer = ""


def pretraining(config: ConfigDict) -> None:
    """Data and schedule of pre-training from random weights; JREG's paper has this optimizer."""
    config.data.task = "tokens"  # shards of scripts/prepare_data.py; or text, jsonl
    config.data.text_field = ""  # jsonl, parquet, hub data
    config.data.passage_chars = 16_384  # text: characters of a shuffled passage, at most
    config.data.validation_fraction = 0.001

    config.batch_size = 512
    config.accumulation = 8
    config.optimizer.schedule = "cosine"
    config.optimizer.final_fraction = 0.1
    config.optimizer.warmup_steps = 1000
    config.optimizer.weight_decay = 0.1
    config.optimizer.b2 = 0.95
    config.optimizer.clip_norm = 1.0
    config.eval.every = 2000
    config.eval.max_batches = 8
    config.checkpoint.every = 1000


def _what_is_kept(config: ConfigDict) -> None:
    """Evaluations, checkpoints, the exported model."""
    config.eval = ConfigDict()
    config.eval.every = 100  # steps; besides before the first and after the last
    config.eval.max_batches = 0  # 0: the whole held-out part
    # "": the objective says; "validation/nll": the least is best; "max:<metric>": the largest.
    config.eval.best_metric = ""

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 500  # steps; 0: only when best, at the end and at a stop
    config.checkpoint.keep = 1  # latest ones
    config.checkpoint.keep_best = True  # the best one stays as well
    config.checkpoint.at_end = True  # False: the exported model alone stays

    config.export = ConfigDict()
    config.export.weights = "last"  # last | best
    config.export.form = "auto"  # auto | padded | native
    # bfloat16 would round away updates as small as those of fine-tuning.
    config.export.dtype = "float32"  # float32 | bfloat16 | float16
