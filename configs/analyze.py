"""What a model's weights, or its hidden states on a text, say: one analysis by name.

Command:   python scripts/analyze.py --config=configs/analyze.py:connectivity --config.model=<any>
           python scripts/analyze.py --config=configs/analyze.py:displacement --config.model=<any> \
             --config.jsonl=<lambada.jsonl>
           python scripts/analyze.py --config=configs/analyze.py:massive --config.model=<any>
           python scripts/analyze.py --config=configs/analyze.py:lesions --config.model=<any> \
             --config.text=<text>
           python scripts/analyze.py --config=configs/analyze.py:ntk --config.model=<any>
           python scripts/analyze.py --config=configs/analyze.py:experts --config.model=<any> \
             --config.text=<directory of texts>
Hardware:  any CPU with the model's size in memory; an accelerator is used where there is one.
Hours:     seconds for SmolLM2-135M; displacement on 40 windows of 512: half a minute on 2 cores;
           lesions an hour or two (it prints as it goes, and resumes where it was stopped); ntk of
           MiniLM-L6 on 872 sentences a minute a method.
Paper:     JREG, Table 1: next-word prediction on 100 samples of LAMBADA. Whether h_L is taken
           before or after the final norm, and over which tokens, is not stated: all are computed.

connectivity: entropy, gini and mstd of the outgoing weights, summed over each layer's neurons
(NUCL, section 3). displacement: how far each block turns the residual stream, jump rates before and
after the final norm, over all tokens and the last of each document, block influence and the order
in which it removes layers (JREG, section 3). A directory of checkpoints, or --config.revisions,
gives the curves over training (its Figure 4). massive: every state's largest magnitudes when bos
stands alone, the layer and the neurons that massive activations come from, and what bos does in
other places of a sentence (House of Cards, section 2, Figures 2 and 3). lesions: what the loss of
one neuron alone costs, of every neuron of the massive layer and of some others. ntk: how far
compressing one feed-forward block moves its outputs and its tangent kernel (MLP Fusion, Table I);
with `expert`, the block is one expert of the layer.
experts: each expert's share of each text's tokens, and how similar the experts' outputs are.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from configs import fuse, perplexity


def get_config(analysis: str = "connectivity") -> ConfigDict:
    config = ConfigDict(
        {
            "analysis": analysis,  # connectivity | displacement | massive | ...
            # Model: a directory, a .gguf file, a hub id or the name of a preset.
            "model": "",
            "revision": placeholder(str),  # branch, tag or commit of a hub id
        }
    )
    if analysis == "massive":
        config.layer = placeholder(int)  # from 0; default: the one with the largest |h| early on
        config.token = placeholder(int)  # instead of bos
        config.sentence = "Summer is warm. Winter is cold."  # bos first, in its middle, last
        config.compute_dtype = "auto"  # float32 | bfloat16; the neurons are found in float32
        return config
    if analysis == "lesions":
        config = perplexity.get_config()  # text, token_ids, window, bos, compute_dtype
        config.update({"analysis": analysis, "max_windows": 2, "compute_dtype": "float32"})
        del config.document  # one window after the other is no sample of documents
        config.layer = placeholder(int)  # from 0; default: the massive layer
        config.token = placeholder(int)  # instead of bos
        config.others = 300  # neurons of other layers, drawn by the seed
        config.seed = 0
        return config
    if analysis == "experts":
        config = perplexity.get_config()  # text: a file, or a directory; window ...
        del config.document, config.compute_dtype  # in float32
        config.update({"analysis": analysis, "max_windows": 20})
        config.against = ()  # directories of other models, of other seeds for example
        return config
    if analysis == "ntk":
        config.layer = 0  # whose block is compressed and looked at, from 0
        config.expert = placeholder(int)  # which block of a layer with experts, from 0
        methods = ("fusion", "merged", "sqrt", "sketch", "hybrid_sketch", "mmd", "svd")
        config.methods = (*methods, "structured", "unstructured")  # as in configs/fuse.py
        config.against = ()  # directories of other models that are compared with the whole one
        config.update({key: fuse.get_config()[key] for key in ("n_init", "canonical", "steps")})
        config.ratio = 0.75  # the paper's 3,072 -> 768 neurons
        config.data = ConfigDict({"task": "sst2", "path": ""})  # rows of p32_glue.py, or a file
        config.fields = ""
        config.max_rows = 0  # only the first max_rows; 0: all
        config.batch_size = 32
        config.seed = 0  # of the methods, and of the head of a model that has none
        config.compute_dtype = "float32"
        return config
    # Of displacement alone:
    config.revisions = ()  # of a hub id, one checkpoint each: ('step1000', 'step2000')
    config.text = ""  # a UTF-8 text file, tokenised whole without special tokens, or ...
    config.jsonl = ""  # documents of unequal length, one JSON object a line, or ...
    config.token_ids = ""  # integers [windows, length] in a .npy file, used whole
    config.text_field = "text"  # of jsonl
    config.max_documents = 100  # only the first lines of jsonl; 0: all
    config.window = 512  # tokens after bos in a window (longer documents are cut to it)
    config.max_windows = 40  # of text, at most; 0: all
    config.window_every = 1  # 25: every 25th window, spread over the text
    config.bos = "auto"  # as of perplexity: auto (the tokenizer's rule) | segment | none
    config.batch_size = 4  # windows at once
    config.compute_dtype = "auto"  # float32 | bfloat16; displacements are float32 in any
    return config
