"""Published models of Llama's architecture: Llama, SmolLM2, DeepSeek, LayerSkip."""

from ffn_heterogeneity.models.config import ModelConfig, RopeConfig
from ffn_heterogeneity.models.families import common

# Common fields of models of one generation; "factor" belongs to Llama 3.1's scaling.
_LLAMA1 = {"vocab_size": 32_000, "norm_eps": 1e-6, "max_position": 2048}
_LLAMA2 = {"vocab_size": 32_000, "max_position": 4096}
_IDS3 = {"bos_id": 128_000, "eos_id": 128_001}
_LLAMA3 = {"vocab_size": 128_256, **_IDS3, "max_position": 8192, "theta": 500_000.0}
_LLAMA31 = _LLAMA3 | {"max_position": 131_072, "factor": 8.0}
_LLAMA32 = _LLAMA31 | {"tied": True, "factor": 32.0}
_SMOLLM2 = {"vocab_size": 49_152, "tied": True, "bos_id": 0, "eos_id": 0, "theta": 100_000.0}
_DEEPSEEK = {"vocab_size": 102_400, "norm_eps": 1e-6, "bos_id": 100_000, "eos_id": 100_001}
_DEEPSEEK |= {"max_position": 4096}
_CODELLAMA = {"vocab_size": 32_016, "max_position": 16_384, "theta": 1_000_000.0}
_CODELLAMA_34B = _CODELLAMA | {"vocab_size": 32_000}
_CODER = {"vocab_size": 32_256, "norm_eps": 1e-6, "bos_id": 32_013, "eos_id": 32_014}
_CODER |= {"max_position": 16_384, "theta": 100_000.0, "linear_factor": 4.0}

# Layers, FFN width, d_model, heads, key-value heads.
_1B = (16, 8192, 2048, 32, 8)
_7B = (32, 11008, 4096, 32, 32)
_7B_OF_30 = (30, 11008, 4096, 32, 32)
_1_3B = (24, 5504, 2048, 16, 16)
_1_7B = (24, 8192, 2048, 32, 32)
_34B = (48, 22016, 8192, 64, 8)
_8B = (32, 14336, 4096, 32, 8)
_13B = (40, 13824, 5120, 40, 40)
_70B = (80, 28672, 8192, 64, 8)


def _preset(kind: dict, shape: tuple[int, ...]) -> ModelConfig:
    kind = {"tied": False, "theta": 10_000.0, "linear_factor": 1.0, "factor": None} | kind
    factor = kind.pop("factor")
    llama3 = (factor, 1.0, 4.0, 8192) if factor else None
    rope = RopeConfig(kind.pop("theta"), kind.pop("linear_factor"), llama3)
    return common.published("llama", shape, rope, **kind)


_MODELS = {
    "llama1_7b": ("huggyllama/llama-7b", _LLAMA1, _7B),
    "llama1_13b": ("huggyllama/llama-13b", _LLAMA1, _13B),
    "llama1_30b": ("huggyllama/llama-30b", _LLAMA1, (60, 17920, 6656, 52, 52)),
    "llama1_65b": ("huggyllama/llama-65b", _LLAMA1, (80, 22016, 8192, 64, 64)),
    "llama2_7b": ("meta-llama/Llama-2-7b-hf", _LLAMA2, _7B),
    "llama2_13b": ("meta-llama/Llama-2-13b-hf", _LLAMA2, _13B),
    "llama2_70b": ("meta-llama/Llama-2-70b-hf", _LLAMA2, _70B),
    "llama3_8b": ("meta-llama/Meta-Llama-3-8B", _LLAMA3, _8B),
    "llama3_70b": ("meta-llama/Meta-Llama-3-70B", _LLAMA3, _70B),
    "llama3_1_8b": ("meta-llama/Llama-3.1-8B", _LLAMA31, _8B),
    "llama3_1_70b": ("meta-llama/Llama-3.1-70B", _LLAMA31, _70B),
    "llama3_1_405b": ("meta-llama/Llama-3.1-405B", _LLAMA31, (126, 53248, 16384, 128, 8)),
    "llama3_2_1b": ("meta-llama/Llama-3.2-1B", _LLAMA32, _1B),
    "llama3_2_3b": ("meta-llama/Llama-3.2-3B", _LLAMA32, (28, 8192, 3072, 24, 8)),
    "smollm2_135m": ("HuggingFaceTB/SmolLM2-135M", _SMOLLM2, (30, 1536, 576, 9, 3)),
    "smollm2_360m": ("HuggingFaceTB/SmolLM2-360M", _SMOLLM2, (32, 2560, 960, 15, 5)),
    "smollm2_1_7b": ("HuggingFaceTB/SmolLM2-1.7B", _SMOLLM2 | {"theta": 130_000.0}, _1_7B),
    "deepseek_llm_7b": ("deepseek-ai/deepseek-llm-7b-base", _DEEPSEEK, _7B_OF_30),
    "deepseek_llm_67b": ("deepseek-ai/deepseek-llm-67b-base", _DEEPSEEK, (95, 22016, 8192, 64, 8)),
    "deepseek_math_7b": ("deepseek-ai/deepseek-math-7b-base", _DEEPSEEK, _7B_OF_30),
    "deepseek_coder_1_3b": ("deepseek-ai/deepseek-coder-1.3b-base", _CODER, _1_3B),
    "deepseek_coder_6_7b": ("deepseek-ai/deepseek-coder-6.7b-base", _CODER, _7B),
    "deepseek_coder_33b": ("deepseek-ai/deepseek-coder-33b-base", _CODER, (62, 19200, 7168, 56, 8)),
    "deepseek_coder_7b_v1_5": ("deepseek-ai/deepseek-coder-7b-base-v1.5", _DEEPSEEK, _7B_OF_30),
    "deepseek_r1_distill_llama_8b": ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", _LLAMA31, _8B),
    "deepseek_r1_distill_llama_70b": ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", _LLAMA31, _70B),
    # Continued training with layer dropout and early exits; the architecture is unchanged.
    "layerskip_llama2_7b": ("facebook/layerskip-llama2-7B", _LLAMA2, _7B),
    "layerskip_llama2_13b": ("facebook/layerskip-llama2-13B", _LLAMA2, _13B),
    "layerskip_llama2_70b": ("facebook/layerskip-llama2-70B", _LLAMA2, _70B),
    "layerskip_codellama_7b": ("facebook/layerskip-codellama-7B", _CODELLAMA, _7B),
    "layerskip_codellama_34b": ("facebook/layerskip-codellama-34B", _CODELLAMA_34B, _34B),
    "layerskip_llama3_8b": ("facebook/layerskip-llama3-8B", _LLAMA3, _8B),
    "layerskip_llama3_2_1b": ("facebook/layerskip-llama3.2-1B", _LLAMA32, _1B),
}
PRESETS = {name: (_preset(kind, shape), hub) for name, (hub, kind, shape) in _MODELS.items()}
