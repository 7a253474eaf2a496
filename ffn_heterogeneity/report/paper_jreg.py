"""What the JREG paper (Shibata et al.) prints, as far as it is known here. Data only.

A number that is not here is not known here, and a report shows "-" for it: nothing is guessed. The
captions are not known here either; what a report puts under a number is our reading of the paper's
experiments, and is said so where even the number is.
"""

from __future__ import annotations

TITLES = {
    "claims": "Claims: what the numbers below say",
    "table_1": "Table 1: jump rates of models",
    "table_2": "Table 2: pre-training without and with JREG",
    "table_3": "Table 3: jump rates by weight and sharpness",
    "table_7": "Table 7: jump rate and loss against steps",
    "figure_1": "Figure 1: angular displacement against depth, of models",
    "figure_2": "Figure 2: angular displacement against depth, without and with JREG",
    "figure_4": "Figure 4: jump rate and loss against steps",
}
OUR_READING = ("table_2", "table_7", "figure_1", "figure_2")

# Jump rates in percent of all its published models; one model's number is not known here.
PUBLISHED = (7.0, 28.0)
TABLE_1 = (
    "Paper: its published models lie between 7 and 28 percent, on 100 samples of LAMBADA; a single "
    "model's number, and whether h_L is before or after the final norm, are not known here."
)

# Layers, width and FFN width -> the paper's name, which is not the number of parameters.
SIZES = {
    "12x768/2048": "170M",
    "16x2048/5376": "1B",
    "30x3072/8192": "3.4B",
}
STEPS = 200_000
BATCH = (512, 1024)  # rows of so many tokens a step
WEIGHT = 1.0
ALPHAS = (0.0, 0.1, 0.3, 0.5, 1.0, 3.0)
BEST_ALPHA = 1.0
# The paper's text, of 170M: from here on the jump is 0. Its own Table 3 has one number against it.
NO_JUMP_FROM = 0.5
TABLE_3 = {("170M", 3.0): {"zeta_L-2": 1.55}}
SETTINGS = (
    "Paper: lambda 1; alpha 0, 0.1, 0.3, 0.5, 1, 3, the best is 1; 200,000 steps of 512 x 1,024 "
    "tokens. Its sizes 170M, 1B and 3.4B are 134.1M, 928M and 3.59B parameters with an untied head."
)
# All without examples in the prompt; acc or acc_norm is not stated.
TASKS = (
    "arc_easy", "boolq", "hellaswag", "lambada_openai", "piqa", "race", "social_iqa", "sciq",
    "swag",
)  # fmt: skip
