"""Tiny models with random weights, and a tiny tokenizer: for unit tests only."""

import atexit
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from calibrations import Calibrations
from causal_qwen import CausalQwen2Config, CausalQwen2ForCausalLM, CausalQwen2Processor, convert
from causal_qwen.conversion import Base, bundled_text, transfer
from causal_qwen.conversion.vocabulary import choose_num_token
from causal_qwen.directories import cache_directory

# The same examples every time, however busy the machine; --hypothesis-profile=default looks for new ones.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same")

# Packed tiny models go with the session; native code that is built stays where it is for everybody.
CACHE = Path(tempfile.mkdtemp(prefix="causal-qwen-cache-"))
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
(cache_directory() / "compiled").mkdir(parents=True, exist_ok=True)
(CACHE / "compiled").symlink_to((cache_directory() / "compiled").resolve())
os.environ["CAUSAL_QWEN_CACHE"] = str(CACHE)

TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}
TEXT = bundled_text("heldout")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


def tiny_tokenizer():
    """One token per byte, and two special ones: 258 tokens."""
    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|start|>", eos_token="<|end|>", pad_token="<|end|>"
    )


def tiny_processor(tokenizer=None, **options):
    """Reads numbers as values; <NUM> is the token after those of the tokenizer."""
    tokenizer = choose_num_token(tokenizer or tiny_tokenizer(), TINY["vocab_size"]).tokenizer
    return CausalQwen2Processor(tokenizer, **options)


def tiny_base(architecture="qwen2", **overrides):
    torch.manual_seed(0)
    fields = TINY | overrides
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**fields)).eval()
    if architecture == "qwen3":  # heads that are wider than hidden_size / heads, and norms that matter
        model = Qwen3ForCausalLM(Qwen3Config(**({"head_dim": 12} | fields))).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        return model
    model = Qwen2ForCausalLM(Qwen2Config(**fields)).eval()
    with torch.no_grad():  # biases start at zero, which would hide a lost one
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.bias.normal_(std=0.2)
    return model


def tiny_source(rows=300, **overrides):
    """A base for `convert`."""
    return Base("tiny", tiny_base(vocab_size=rows, **overrides), tiny_tokenizer())


def tiny_causal(**overrides):
    """A causal model with nothing left at zero, so that every path carries signal."""
    torch.manual_seed(1)
    model = CausalQwen2ForCausalLM(CausalQwen2Config(**(TINY | {"num_token_id": 258} | overrides))).eval()
    with torch.no_grad():
        for parameter in [*model.abduction.parameters(), *model.action.parameters()]:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def gradients(model, **inputs):
    """Of every parameter, by the loss of a labelled batch."""
    model.zero_grad()
    labels = inputs["labels"]
    model(labels.clamp(min=0), **inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def number_batches(count=6, rows=8, length=10, seed=0, **extra):
    """Random ids with a number at the end of each row, and noise in between."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(0, 256, (rows, length), generator=generator)
        ids[:, -1] = ids[:, 3] = 258
        values = torch.where(ids == 258, torch.randn(rows, length, generator=generator).double() * 100, 0.0)
        labels = ids.clone()
        labels[:, :5] = -100
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "numeric_values": values}
        batches.append(batch | {"labels": labels} | extra)
    return batches


def pytest_collection_modifyitems(items):
    """Give workers the files with slow tests first, so that at the end none waits long for another."""
    twice = [name for name, count in Counter(item.nodeid for item in items).items() if count > 1]
    if twice:  # of tests with one id pytest-xdist runs one, and tells nobody
        raise pytest.UsageError(f"tests share an id: {', '.join(twice)}")
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="module")
def one_thread():
    """Tiny matrices gain nothing from a second thread and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def calibrated_once(tmp_path_factory):
    """What one test of the session has calibrated, in any worker, is taken by those that ask for the same."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    calibrations = Calibrations(shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "text_features", calibrations.text_features)
        patch.setattr(transfer, "calibrate", calibrations.calibrate)
        yield


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def base_directory(tmp_path_factory):
    """A saved Qwen2 checkpoint with spare vocabulary rows: 300 against 258 tokens."""
    directory = tmp_path_factory.mktemp("base")
    tiny_base(tie_word_embeddings=True).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def base():
    return tiny_source(tie_word_embeddings=True)


@pytest.fixture(scope="session")
def conversion(base):
    """The base converted and calibrated; not to be changed."""
    return convert(base, calibration_text=TEXT)


@pytest.fixture
def ids():
    return torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(2))
