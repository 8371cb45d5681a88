"""The echo model: a checkpoint whose greedy answer to any prompt is known exactly.

It is a Qwen2 of one layer (further ones change nothing) whose tokens are bytes. Embeddings are one-hot, the value and output projections and the
head are the identity, and queries and keys are constant vectors, so that attention depends on nothing but the distance
between two positions. The rotary angles are weighted such that a query likes best the key at distance 255, and any
other the less the further it is from there. So each new token is a copy of the one 256 places before it, or of the
prompt's first token while there are not that many. An answer thus reads KV pages of the whole prompt, has one right
value, and a page that is not the prompt's own shows up as text of its owner.

    python -m pd_rig.model PATH     writes the checkpoint (config, weights, tokenizer with a chat template)
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from pd_rig.home import rig_home

#: How far back the token lies that is copied.
LAG = 256

_VOCAB = 512  # bytes, padding, and the end token as the last
_END = "<|endoftext|>"
_HEAD_DIM = 64
_ROPE_THETA = 100.0
_MAX_POSITIONS = 65536
_MARGIN = 6.0  # nats by which attention falls with each step away from the peak, as far as there is a step
_FAR_MARGIN = 30.0  # nats by which every distance beyond those steps lies below the peak
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_REVISION = 1  # part of the folder's name: raise it when the checkpoint changes


def echo(prompt: str, n: int) -> str:
    """The exact greedy completion of ``n`` tokens, for any prompt of one ASCII character or more."""
    if not prompt or not prompt.isascii():
        raise ValueError("the echo model answers non-empty ASCII prompts")
    text = prompt
    for _ in range(n):
        text += text[max(0, len(text) - LAG)]
    return text[len(prompt) :]


def _frequencies():
    import numpy as np

    return _ROPE_THETA ** (-np.arange(0, _HEAD_DIM, 2) / _HEAD_DIM)


def _weights():
    """How much each rotary frequency counts: the least that keeps both margins.

    At ``x`` places from the peak the attention score is lower by sum(w_i * (1 - cos(f_i * x))), an even function of x.
    Towards the start of a prompt it has to fall with every one of the ``LAG - 1`` steps; in the other direction it is
    enough that it stays far below the peak.
    """
    import numpy as np
    from scipy.optimize import linprog

    f = _frequencies()
    near = 1 - np.cos(np.outer(np.arange(LAG), f))
    far = 1 - np.cos(np.outer(np.arange(LAG, _MAX_POSITIONS), f))
    bounds = np.concatenate([np.full(LAG - 1, _MARGIN), np.full(len(far), _FAR_MARGIN)])
    found = linprog(np.ones(len(f)), A_ub=-np.concatenate([np.diff(near, axis=0), far]), b_ub=-bounds)
    if not found.success:
        raise RuntimeError(f"no weights for the echo model: {found.message}")
    return found.x


def _query_and_key():
    """The constant query and key of every head: their rotated product is the score, peak at distance LAG - 1."""
    import numpy as np

    amplitude = np.sqrt(_weights() * np.sqrt(_HEAD_DIM))  # attention divides by sqrt(head dim)
    angle = (LAG - 1) * _frequencies()
    query = np.concatenate([amplitude, np.zeros_like(amplitude)])
    key = np.concatenate([amplitude * np.cos(angle), amplitude * np.sin(angle)])
    return query, key


def _tensors(layers: int) -> dict:
    import torch

    eye, zeros, ones = torch.eye(_VOCAB), torch.zeros, torch.ones(_VOCAB)
    query, key = (torch.tensor(v, dtype=torch.float32).repeat(_VOCAB // _HEAD_DIM) for v in _query_and_key())
    layer = {
        "input_layernorm.weight": ones,
        "post_attention_layernorm.weight": ones,
        "self_attn.q_proj.weight": zeros(_VOCAB, _VOCAB),
        "self_attn.q_proj.bias": query,
        "self_attn.k_proj.weight": zeros(_VOCAB, _VOCAB),
        "self_attn.k_proj.bias": key,
        "self_attn.v_proj.weight": eye,
        "self_attn.v_proj.bias": zeros(_VOCAB),
        # Ten times: the attended token has to drown the current one, which the residual carries to the head.
        "self_attn.o_proj.weight": 10 * eye,
        "mlp.gate_proj.weight": zeros(64, _VOCAB),
        "mlp.up_proj.weight": zeros(64, _VOCAB),
        "mlp.down_proj.weight": zeros(_VOCAB, 64),
    }
    tensors = {f"model.layers.{i}.{name}": tensor for i in range(layers) for name, tensor in layer.items()}
    for i in range(1, layers):
        tensors[f"model.layers.{i}.self_attn.o_proj.weight"] = zeros(_VOCAB, _VOCAB)
    tensors |= {"model.embed_tokens.weight": eye, "model.norm.weight": ones, "lm_head.weight": eye}
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def _config(layers: int) -> dict:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": _VOCAB,
        "hidden_size": _VOCAB,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": _VOCAB // _HEAD_DIM,
        "num_key_value_heads": _VOCAB // _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": _MAX_POSITIONS,
        "rope_theta": _ROPE_THETA,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": _VOCAB - 1,
    }


def _tokenizer():
    """Every byte is a token, whose id is its value."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, the rest for U+0100 and up, in order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    vocab = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {_END: _VOCAB - 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    return tokenizer


def make_model(path: Path, layers: int = 1) -> None:
    """Write the checkpoint into the folder ``path``."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_config(layers), indent=1))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": _VOCAB - 1}))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _END,
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _MAX_POSITIONS,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
    _tokenizer().save(str(path / "tokenizer.json"))
    save_file(_tensors(layers), path / "model.safetensors", metadata={"format": "pt"})


def ensure_model(layers: int = 1) -> Path:
    """The checkpoint under the rig's home, made at the first call; safe when several processes ask at once."""
    path = rig_home() / (f"echo-{_REVISION}" if layers == 1 else f"echo-{_REVISION}-{layers}-layers")
    if not path.exists():
        rig_home().mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=rig_home()))
        try:
            make_model(scratch, layers)
            scratch.chmod(0o755)
            os.rename(scratch, path)
        except OSError:
            if not path.exists():  # else: another process was first
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m pd_rig.model PATH")
    make_model(Path(sys.argv[1]))
