"""Tiny encoders of transformers' own classes."""

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 20, "attn_implementation": "eager"}
# transformers' name of the family -> rows of its table of token types
TYPES = {"Bert": 2, "Roberta": 1}


def kind_of(architecture: str) -> str:
    """The family of one of transformers' classes."""
    return next(kind for kind in TYPES if architecture.startswith(kind))


def torch_encoder(torch, architecture: str):
    """One of transformers' classes with random weights, norms and biases too."""
    import transformers

    kind = kind_of(architecture)
    config = getattr(transformers, f"{kind}Config")(**SIZES, type_vocab_size=TYPES[kind])
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15)
            parameter.copy_(noise + float("LayerNorm.weight" in name))
    return model.float().eval()
