"""What the NUCL paper (Stahlberg & Kumar) prints, as far as it is known here. Data only.

A number that is not here is not known here, and a report shows "-" for it: nothing is guessed.
Nor are the captions of Tables 1, 2, 7 and 8; what a report puts under those numbers is our reading
of the paper's experiments (PaLM-2 and Gemma-2 fine-tuned; Appendix C's settings), and is said so.
"""

from __future__ import annotations

TITLES = {
    "table_1": "Table 1: fine-tuning PaLM-2 with NUCL",
    "table_2": "Table 2: fine-tuning Gemma-2 with NUCL",
    "table_3": "Table 3: which connections the loss acts on",
    "table_4": "Table 4: data-free removal of a quarter of the neurons, by criterion",
    "table_5": "Table 5: removal from a part of the layers",
    "table_7": "Table 7: settings of fine-tuning",
    "table_8": "Table 8: the weight alpha",
    "figure_2": "Figure 2: entropy of the outgoing connections against steps",
    "figure_3": "Figure 3: validation NLL against steps",
    "figure_4": "Figure 4: removal from two adjacent layers",
}
OUR_READING = ("table_1", "table_2", "table_7", "table_8", "figure_2", "figure_3")

# Presets of this library, and the last parts of hub ids -> the paper's models.
GEMMA = {
    "gemma2_2b": "Gemma-2 2B", "gemma-2-2b": "Gemma-2 2B",
    "gemma2_9b": "Gemma-2 9B", "gemma-2-9b": "Gemma-2 9B",
    "gemma2_27b": "Gemma-2 27B", "gemma-2-27b": "Gemma-2 27B",
}  # fmt: skip
GEMMA_DATA = ("gsm8k", "mbpp")
# Weights that nobody outside can run.
CLOSED = "PaLM-2"
CLOSED_DATA = ("superglue", "gsm8k", "mbpp")

# Gain over plain fine-tuning, points of GSM8K accuracy, Gemma-2 2B; with which variant, is not
# known here.
GAIN = 2.71
TABLE_3 = {"ffn_out": GAIN}

# Few-shot accuracies in percent, Gemma-2 2B, 25% of every layer's neurons: row -> task -> value.
# The three weak baselines stand at chance, the random row far above them.
TABLE_4 = {
    "magnitude": {"mmlu": 22.95},
    "srinivas_babu": {"mmlu": 22.95},
    "stahlberg_byrne": {"mmlu": 22.95},
}
# Its columns, with the number of examples in the prompt.
SHOTS = {
    "mmlu": 5, "hellaswag": 10, "arc_easy": 0, "piqa": 0, "social_iqa": 0, "triviaqa": 5,
    "nq_open": 5,
}  # fmt: skip
REMOVAL = (
    "Gemma-2 2B at 25%: 9,216 -> 6,912 neurons a layer, 414.06M parameters removed, 16% of the "
    "model."
)

# Setting -> (Gemma-2, PaLM-2).
SETTINGS = {
    "optimiser": ("-", "AdaFactor"),
    "batch size": ("16", "32"),
    "learning rate": ("1e-6", "1e-4 to 1e-6"),
    "warm-up steps, linear": ("100", "-"),
    "dropout": ("0.1", "0 or 0.1"),
    "steps": ("-", "-"),
    "alpha": ("powers of ten, 1e-2 to 1e4", "powers of ten, 1e-2 to 1e4"),
    "hardware": ("TPU v5e 8x8 (2B), 16x16 (9B, 27B)", "-"),
}
# Of the curves in Figures 2 and 3.
FIGURE_ALPHAS = "10 to 1000"
